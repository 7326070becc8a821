// Every way in which a library can fail to be a plugin. Needs no real plugin.
#include "driver_under_test.h"

static jpp_status_t* create(const char* path) {
  jpp_client_t* client = (jpp_client_t*)&path;
  jpp_pjrt_options_t options = {.struct_size = sizeof(options), .plugin_path = path};
  jpp_status_t* status = jpp_client_create_pjrt(&options, &client);
  assert_null(client);
  return status;
}

static void test_missing_file(void** state) {
  (void)state;
  ASSERT_FAILS(create("/no/such/plugin.so"), JPP_PLUGIN_ERROR,
               "plugin /no/such/plugin.so: no such file");
  ASSERT_FAILS(create(NULL), JPP_PLUGIN_ERROR, "plugin (none): no such file");
}

static void test_file_that_is_no_library(void** state) {
  (void)state;
  ASSERT_FAILS(create(STUB_TEXT_FILE), JPP_PLUGIN_ERROR, "not a loadable library: ");
}

static void test_library_that_is_no_plugin(void** state) {
  (void)state;
  ASSERT_FAILS(create(STUB_NO_ENTRY), JPP_PLUGIN_ERROR,
               "not a PJRT plugin: it exports no GetPjrtApi");
}

static void test_api_that_is_too_old(void** state) {
  (void)state;
  ASSERT_FAILS(create(STUB_OLD), JPP_PLUGIN_ERROR,
               "expected PJRT API 0.57 or a later 0.x, found 0.56");
}

static void test_api_of_another_major_version(void** state) {
  (void)state;
  ASSERT_FAILS(create(STUB_MAJOR), JPP_PLUGIN_ERROR,
               "expected PJRT API 0.57 or a later 0.x, found 1.81");
}

static void test_api_that_is_too_small(void** state) {
  (void)state;
  ASSERT_FAILS(create(STUB_SMALL), JPP_PLUGIN_ERROR,
               "bytes or more, found 128 in API 0.81");
  ASSERT_FAILS(create(STUB_TINY), JPP_PLUGIN_ERROR, "16 bytes, too few for a version");
}

static void test_plugin_that_fails_to_start(void** state) {
  (void)state;
  for (int i = 0; i < 2; ++i) {
    ASSERT_FAILS(create(STUB_FAILING), JPP_PLUGIN_ERROR,
                 "cannot be initialised: the stub does not start");
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_missing_file),
      cmocka_unit_test(test_file_that_is_no_library),
      cmocka_unit_test(test_library_that_is_no_plugin),
      cmocka_unit_test(test_api_that_is_too_old),
      cmocka_unit_test(test_api_of_another_major_version),
      cmocka_unit_test(test_api_that_is_too_small),
      cmocka_unit_test(test_plugin_that_fails_to_start),
  };
  return cmocka_run_group_tests_name("pjrt errors", tests, NULL, NULL);
}
