// Nodes through PJRT, with a plugin written for the test: what options the plugin gets,
// what it reads from the store, and how errors in the store are reported.
#include "driver_under_test.h"
#include "test_store.h"

typedef struct node {
  jpp_pjrt_options_t options;
  const char* act;  // what the plugin does; NULL: it looks for the other nodes
  uint32_t devices;
  uint32_t timeout_ms;
  test_store_t* store;
  jpp_client_t* client;
  jpp_status_t* status;
} node_t;

static node_t make_node(test_store_t* store, uint32_t node_id, uint32_t num_nodes) {
  return (node_t){.options = {.struct_size = sizeof(jpp_pjrt_options_t),
                              .plugin_path = NODES_PLUGIN,
                              .node_id = node_id,
                              .num_nodes = num_nodes},
                  .devices = 2,
                  .timeout_ms = 60000,
                  .store = store};
}

static void* create_main(void* user) {
  node_t* node = user;
  static const int64_t kVisible[] = {0, 1, 2, 3};
  jpp_int64_list_t visible = {.values = kVisible, .count = node->devices};
  jpp_client_option_t options[] = {
      {.name = "visible_devices",
       .type = JPP_OPTION_INT64_LIST,
       .int64_list_value = &visible},
      {.name = "timeout_ms", .type = JPP_OPTION_INT64, .int64_value = node->timeout_ms},
      {.name = "act", .type = JPP_OPTION_STRING, .string_value = node->act}};
  jpp_key_value_store_t store = test_store_calls(node->store);
  node->options.options = options;
  node->options.option_count = node->act ? 3 : 2;
  node->options.store = &store;
  node->status = jpp_client_create_pjrt(&node->options, &node->client);
  memset(&store, 0, sizeof(store));  // the client has copied it
  return NULL;
}

static jpp_status_t* create(node_t* node) {
  create_main(node);
  return node->status;
}

static void test_clients_know_the_devices_of_all(void** state) {
  (void)state;
  enum { kNodes = 3 };
  test_store_t store;
  node_t nodes[kNodes];
  pthread_t threads[kNodes];
  test_store_init(&store);
  for (uint32_t i = 0; i < kNodes; ++i) {
    nodes[i] = make_node(&store, i, kNodes);
    nodes[i].devices = i + 1;
    assert_int_equal(pthread_create(&threads[i], NULL, create_main, &nodes[i]), 0);
  }
  for (uint32_t i = 0; i < kNodes; ++i) pthread_join(threads[i], NULL);
  static const int32_t kIds[kNodes][6] = {
      {0, 10, 11, 20, 21, 22}, {10, 11, 0, 20, 21, 22}, {20, 21, 22, 0, 10, 11}};
  for (uint32_t n = 0; n < kNodes; ++n) {
    ASSERT_OK(nodes[n].status);
    const jpp_client_info_t* info = jpp_client_info(nodes[n].client);
    assert_int_equal(info->node_id, n);
    assert_int_equal(info->device_count, n + 1);
    assert_int_equal(info->global_device_count, 6);
    for (uint32_t i = 0; i < 6; ++i) {
      assert_int_equal(info->global_devices[i].id, kIds[n][i]);
      assert_int_equal(info->global_devices[i].node, kIds[n][i] / 10);
      assert_string_equal(info->global_devices[i].kind, "stub");
      if (i <= n) assert_int_equal(info->devices[i].id, kIds[n][i]);
    }
    jpp_client_destroy(nodes[n].client);
  }
  assert_true(test_store_has(&store, "stub/2", "3"));
  assert_true(test_store_has(&store, "bye/0", "1"));
  assert_true(test_store_has(&store, "bye/2", "1"));
  test_store_deinit(&store);
}

static void test_a_client_alone_has_no_store(void** state) {
  (void)state;
  test_store_t store;
  test_store_init(&store);
  for (uint32_t num_nodes = 0; num_nodes < 2; ++num_nodes) {
    node_t node = make_node(&store, 0, num_nodes);
    ASSERT_OK(create(&node));
    assert_int_equal(jpp_client_info(node.client)->global_device_count, 2);
    jpp_client_destroy(node.client);
  }
  assert_int_equal(store.count, 0);
  test_store_deinit(&store);
}

static void test_what_the_plugin_is_told_of_the_store(void** state) {
  (void)state;
  static const struct {
    test_fault_t fault;
    const char *key, *act, *text;
    jpp_status_code_t code;
  } kCases[] = {
      {TEST_FAULT_NONE, "", NULL, "stub/1: no node has put the key in 300 ms",
       JPP_PLUGIN_ERROR},
      {TEST_FAULT_GET, "stub/1", NULL, "cannot make a client: the store is gone",
       JPP_PLUGIN_ERROR},
      {TEST_FAULT_PUT, "stub/0", NULL, "cannot make a client: the store is full",
       JPP_PLUGIN_ERROR},
      {TEST_FAULT_NONE, "", "try missing", "no node has put the key yet",
       JPP_PLUGIN_ERROR},
      {TEST_FAULT_NONE, "", "NUL", "a key of 3 bytes has a NUL in it", JPP_PLUGIN_ERROR},
      {TEST_FAULT_NONE, "", "unknown",
       "expected a plugin that makes programs over the devices of several processes, "
       "found one that does not: cannot make a client: unknown option: num_nodes",
       JPP_UNSUPPORTED},
      {TEST_FAULT_NONE, "", "alone",
       "expected a client that is node 0 of 2 and knows the devices of each, found one "
       "that is node 0 and knows 2 devices, 2 of its own",
       JPP_UNSUPPORTED},
  };
  for (size_t i = 0; i < sizeof(kCases) / sizeof(kCases[0]); ++i) {
    test_store_t store;
    test_store_init(&store);
    store.fault = kCases[i].fault;
    store.key = kCases[i].key;
    node_t node = make_node(&store, 0, 2);
    node.act = kCases[i].act;
    node.timeout_ms = 300;
    ASSERT_FAILS(create(&node), kCases[i].code, kCases[i].text);
    assert_null(node.client);
    test_store_deinit(&store);
  }
}

static void test_options_of_nodes_are_checked(void** state) {
  (void)state;
  test_store_t store;
  test_store_init(&store);
  node_t beyond = make_node(&store, 2, 2);
  ASSERT_FAILS(create(&beyond), JPP_INVALID_ARGUMENT,
               "expected a node_id below 2, num_nodes; found 2");
  jpp_pjrt_options_t options = make_node(NULL, 0, 2).options;
  jpp_client_t* client = NULL;
  ASSERT_FAILS(jpp_client_create_pjrt(&options, &client), JPP_INVALID_ARGUMENT,
               "expected a store for 2 nodes, found NULL");
  test_store_deinit(&store);
}

// What an older caller has there is no option of nodes.
static void test_a_caller_without_nodes(void** state) {
  (void)state;
  jpp_pjrt_options_t options = make_node(NULL, 1, 2).options;
  options.struct_size = offsetof(jpp_pjrt_options_t, store);
  jpp_client_t* client = NULL;
  ASSERT_OK(jpp_client_create_pjrt(&options, &client));
  assert_int_equal(jpp_client_info(client)->global_device_count, 2);
  jpp_client_destroy(client);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_clients_know_the_devices_of_all),
      cmocka_unit_test(test_a_client_alone_has_no_store),
      cmocka_unit_test(test_what_the_plugin_is_told_of_the_store),
      cmocka_unit_test(test_options_of_nodes_are_checked),
      cmocka_unit_test(test_a_caller_without_nodes),
  };
  return cmocka_run_group_tests_name("nodes of pjrt", tests, NULL, NULL);
}
