// Lays out the file of a flight recorder and maps it to memory.
#include "flight/record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"

static size_t count_instrs(const jpp_flight_rank_t* ranks, uint32_t num_ranks) {
  size_t count = 0;
  for (uint32_t r = 0; r < num_ranks; ++r) count += ranks[r].num_instrs;
  return count;
}

static void fill_rows(char* at, const jpp_flight_rank_t* ranks, uint32_t num_ranks) {
  jpp_flight_row_t* rows = (jpp_flight_row_t*)at;
  jpp_flight_instr_t* instrs = (jpp_flight_instr_t*)(rows + num_ranks);
  uint32_t first = 0;
  for (uint32_t r = 0; r < num_ranks; ++r) {
    rows[r].rank = ranks[r].rank;
    rows[r].num_instrs = ranks[r].num_instrs;
    rows[r].first_instr = first;
    for (uint32_t i = 0; i < ranks[r].num_instrs; ++i) {
      instrs[first++] = ranks[r].instrs[i];
    }
  }
}

// Maps `size` zeros and reserves their blocks on the disk: without that, a store would
// kill the process when the disk is full.
static jpp_status_t* map_file(int descriptor, size_t size, char** out_memory) {
  int error = posix_fallocate(descriptor, 0, (off_t)size);
  void* memory = MAP_FAILED;
  if (!error) {
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    error = errno;
  }
  *out_memory = memory;
  if (memory != MAP_FAILED) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "%s", strerror(error));
}

static jpp_status_t* make_file(const char* path, size_t size, char** out_memory) {
  int descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return jpp_status_make(JPP_INVALID_ARGUMENT, "%s", strerror(errno));
  jpp_status_t* status = map_file(descriptor, size, out_memory);
  close(descriptor);
  if (status) unlink(path);
  return status;
}

jpp_status_t* jpp__flight_open(const char* folder, uint32_t process,
                               const jpp_flight_rank_t* ranks, uint32_t num_ranks,
                               const char* texts, size_t texts_size,
                               jpp_flight_t* out_flight) {
  static atomic_uint made;
  uint32_t runtime = atomic_fetch_add(&made, 1);
  size_t before = sizeof(jpp_flight_head_t) + num_ranks * sizeof(jpp_flight_row_t) +
                  count_instrs(ranks, num_ranks) * sizeof(jpp_flight_instr_t);
  char *path = NULL, *memory = NULL;
  *out_flight = (jpp_flight_t){0};
  mkdir(folder, 0777);
  // Process and runtime numbers say which files belong together; time and process id
  // distinguish this process from an earlier one with the same number.
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "%s/process%u-runtime%u-%lld-%d.flight", folder, process, runtime,
                  (long long)time(NULL), (int)getpid());
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &path));
  jpp_status_t* status = make_file(path, before + texts_size, &memory);
  if (status) status = jpp_status_annotate(status, "JPP_FLIGHT: %s", path);
  jpp_free(path);
  if (status) return status;
  jpp_flight_head_t* head = (jpp_flight_head_t*)memory;
  head->begun = head->alive = jpp__clock_now();
  head->realtime = jpp__clock_real_now() - head->begun;
  head->process = process;
  head->pid = (uint32_t)getpid();
  head->runtime = runtime;
  gethostname(head->host, sizeof(head->host) - 1);
  head->num_rows = num_ranks;
  head->texts_size = texts_size;
  head->size = before + texts_size;
  fill_rows(memory + sizeof(*head), ranks, num_ranks);
  if (texts_size) memcpy(memory + before, texts, texts_size);
  head->magic = kJppFlightMagic;
  out_flight->head = head;
  out_flight->rows = (jpp_flight_row_t*)(memory + sizeof(*head));
  return NULL;
}

void jpp__flight_failed(const jpp_flight_t* flight, const jpp_status_t* status) {
  jpp_flight_head_t* head = flight->head;
  if (!head || head->failed) return;
  snprintf(head->failure, sizeof(head->failure), "%s", jpp_status_message(status));
  head->failed = jpp__clock_now();
}

void jpp__flight_close(jpp_flight_t* flight) {
  if (!flight->head) return;
  flight->head->ended = jpp__clock_now();
  munmap(flight->head, flight->head->size);
  *flight = (jpp_flight_t){0};
}
