// Which process owns which devices of each rank, and which meshes are refused.
#include "jaxpp/job_ranks.h"
#include "test_util.h"

enum { kMost = 8 };

typedef struct mesh_row {
  uint32_t ranks, size;
  uint32_t owners[kMost];
  uint32_t process;
  uint32_t rank_process[kMost];
  uint32_t num_places, places[kMost];
} mesh_row_t;

static const mesh_row_t kDivided[] = {
    {2, 2, {0, 1, 2, 3}, 0, {0, 2}, 1, {0}},
    {2, 2, {0, 1, 2, 3}, 3, {1, 3}, 1, {1}},
    {3, 2, {0, 1, 0, 1, 0, 1}, 1, {1, 1, 1}, 1, {1}},
    {2, 2, {0, 0, 1, 1}, 1, {0, 1}, 2, {0, 1}},
    {3, 2, {0, 0, 0, 0, 1, 1}, 1, {0, 0, 1}, 2, {0, 1}},
    {2, 4, {0, 0, 1, 1, 3, 3, 2, 2}, 3, {0, 3}, 2, {0, 1}},
    {2, 4, {0, 1, 0, 1, 2, 3, 2, 3}, 2, {0, 2}, 2, {0, 2}},
    {2, 3, {0, 1, 1, 2, 3, 3}, 3, {1, 3}, 2, {1, 2}},
    {2, 2, {0, 1, 2, 3}, 4, {0, 2}, 1, {0}},  // a process without devices
    {1, 1, {0}, 0, {0}, 1, {0}},
};

static jpp_job_mesh_t mesh_of(uint32_t ranks, uint32_t size, const uint32_t* owners) {
  return (jpp_job_mesh_t){.struct_size = sizeof(jpp_job_mesh_t),
                          .num_ranks = ranks,
                          .rank_size = size,
                          .owners = owners};
}

static void test_parts(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof(kDivided) / sizeof(*kDivided); ++i) {
    const mesh_row_t* row = &kDivided[i];
    jpp_job_mesh_t mesh = mesh_of(row->ranks, row->size, row->owners);
    jpp_job_part_t part;
    ASSERT_OK(jpp_job_divide_ranks(&mesh, row->process, &part));
    bool spans = false;
    for (uint32_t k = 0; k < row->ranks * row->size; ++k) {
      spans |= row->owners[k] != row->owners[k / row->size * row->size];
    }
    assert_int_equal(part.spans, spans);
    assert_int_equal(part.num_ranks, row->ranks);
    assert_int_equal(part.num_places, row->num_places);
    assert_memory_equal(part.rank_process, row->rank_process,
                        row->ranks * sizeof(uint32_t));
    assert_memory_equal(part.places, row->places, row->num_places * sizeof(uint32_t));
    jpp_job_part_free(&part);
  }
}

typedef struct refused_row {
  uint32_t ranks, size;
  uint32_t owners[kMost];
  const char* text;
} refused_row_t;

static const refused_row_t kRefused[] = {
    {2,
     2,
     {0, 1, 1, 0},
     "rank 1: expected the devices of process 1 at positions [1], as in its other ranks, "
     "found them at [0]; build"},
    {2,
     2,
     {0, 1, 2, 2},
     "rank 1: expected its devices to be split among processes like rank 0's, processes "
     "[0, 1], found processes [2, 2]; build"},
    {2, 4, {0, 0, 1, 1, 2, 3, 3, 3}, "like rank 0's, processes [0, 0, 1, 1], found"},
    {4,
     2,
     {0, 1, 0, 1, 2, 3, 2, 3},
     "process 0: expected devices of one rank or of all 4, because ranks span processes, "
     "found devices of ranks [0, 1]"},
    {2, 2, {0, 1, 0, 0}, "found them at [0, 1]; build the mesh so that each process has"},
};

static void test_refused(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof(kRefused) / sizeof(*kRefused); ++i) {
    const refused_row_t* row = &kRefused[i];
    jpp_job_mesh_t mesh = mesh_of(row->ranks, row->size, row->owners);
    for (uint32_t process = 0; process < 5; ++process) {
      jpp_job_part_t part;
      ASSERT_FAILS(jpp_job_divide_ranks(&mesh, process, &part), JPP_UNSUPPORTED,
                   row->text);
    }
  }
}

static void test_where_ranks_cannot_span(void** state) {
  (void)state;
  const uint32_t owners[] = {3, 1, 2, 0};
  jpp_job_mesh_t mesh = mesh_of(2, 2, owners);
  jpp_job_part_t part;
  mesh.on_cpu = true;
  ASSERT_FAILS(jpp_job_divide_ranks(&mesh, 0, &part), JPP_UNSUPPORTED,
               "rank 0: expected its devices in one process, found them in processes [1, "
               "3]; build");
  mesh.on_cpu = false;
  mesh.shares_devices = true;
  ASSERT_FAILS(jpp_job_divide_ranks(&mesh, 0, &part), JPP_UNSUPPORTED,
               "rank 0: its devices are in processes [1, 3] and shared with other ranks");
  mesh.num_ranks = 0;
  ASSERT_FAILS(jpp_job_divide_ranks(&mesh, 0, &part), JPP_INVALID_ARGUMENT,
               "expected a mesh with devices");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_refused),
      cmocka_unit_test(test_where_ranks_cannot_span),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
