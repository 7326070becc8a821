// Plan files: any content is either read or refused. The target first corrects the size
// and the checksum, which no mutation would get right, and the mutator starts from a
// valid file.
#include "fuzz.h"
#include "jaxpp/planfile.h"
#include "planfile/format.h"

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed);
int LLVMFuzzerInitialize(int* count, char*** words);

static uint8_t g_sound[1 << 14];
static size_t g_size;

static const char kGraph[] =
    "graph \"g\" ranks 2\narg %w f32[4] \"w\" donated\narg %v f32[4] \"v\"\n"
    "loop microbatches 2 stages 2 schedule \"1f1b\" index %i at \"f.py:1\" {\n"
    "  %a:f32[4] = f(%w, %i)\n  %m:f32[4] = @mark 0 (%a)\n"
    "  %b:f32[4] = g(%m, %v)\n  %n:f32[4] = @mark 1 (%b)\n"
    "} %r:f32[4] = add %n\nout %r \"r\" next %w\n";

// Saves the plan with the same module for every task.
static void save(const jpp_planned_t* planned, const char* path) {
  static const int32_t kIds[] = {0, 1, 2, 3};
  static const float kConstant[4] = {1};
  static const int64_t kDims[] = {2}, kStarts[] = {0, 2};
  uint32_t task_modules[64] = {0};
  const jpp_planfile_layout_t box = {kDims, kStarts};
  const jpp_planfile_layout_t layouts[] = {box, box, box};
  const jpp_planfile_bytes_t module = {"code", 4}, constant = {kConstant, 16};
  FUZZ_CHECK(planned->staged->num_tasks <= 64);
  for (uint32_t t = 0; t < planned->staged->num_tasks; ++t) {
    if (!planned->staged->tasks[t].num_ops) task_modules[t] = JPP_NONE;
  }
  jpp_planfile_contents_t contents = {.struct_size = sizeof(contents),
                                      .planned = planned,
                                      .platform = "cpu",
                                      .format = "mlir",
                                      .devices_per_rank = 2,
                                      .device_ids = kIds,
                                      .num_modules = 1,
                                      .modules = &module,
                                      .task_modules = task_modules,
                                      .num_constants = 1,
                                      .constants = &constant,
                                      .layouts = layouts,
                                      .front = {"front", 5}};
  FUZZ_CHECK(fuzz_ok(jpp_planfile_save(&contents, path)));
}

int LLVMFuzzerInitialize(int* count, char*** words) {
  (void)count;
  (void)words;
  jpp_graph_t* graph = NULL;
  jpp_planned_t* planned = NULL;
  char path[] = "/tmp/jaxpp-fuzz-XXXXXX";
  int descriptor = mkstemp(path);
  FUZZ_CHECK(descriptor >= 0);
  close(descriptor);
  FUZZ_CHECK(fuzz_ok(jpp_graph_parse(kGraph, strlen(kGraph), "base", &graph)));
  FUZZ_CHECK(fuzz_ok(jpp_plan_graph(graph, NULL, &planned)));
  save(planned, path);
  FILE* file = fopen(path, "rb");
  FUZZ_CHECK(file);
  g_size = fread(g_sound, 1, sizeof(g_sound), file);
  FUZZ_CHECK(g_size > JPP_PLANFILE_HEAD_SIZE && g_size < sizeof(g_sound));
  fclose(file);
  unlink(path);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  if (size <= JPP_PLANFILE_HEAD_SIZE && g_size <= most) {
    memcpy(data, g_sound, g_size);
    size = g_size;
  }
  // Mutates the header in one run of sixteen, otherwise only what follows it.
  size_t kept = seed % 16 && size > JPP_PLANFILE_HEAD_SIZE ? JPP_PLANFILE_HEAD_SIZE : 0;
  return kept + LLVMFuzzerMutate(data + kept, size - kept, most - kept);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint8_t* bytes = (uint8_t*)malloc(size ? size : 1);
  memcpy(bytes, data, size);
  if (size >= JPP_PLANFILE_HEAD_SIZE) {
    jpp__planfile_put(bytes + JPP_PLANFILE_SIZE_AT, 8, size);
    jpp__planfile_put(bytes + JPP_PLANFILE_HASH_AT, 8, jpp__planfile_hash(bytes, size));
  }
  jpp_planfile_t* file = NULL;
  if (!fuzz_ok(jpp_planfile_read("input", bytes, size, &file))) FUZZ_CHECK(!file);
  jpp_planfile_destroy(file);
  free(bytes);
  return 0;
}
