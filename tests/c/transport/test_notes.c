// The conformance suite of notes: three transports of one process in a row, of which the
// outer ones have no channel between them.
//
// The driver is the first argument.
#include "pair.h"

enum { kNoteProcesses = 3 };

typedef struct note {
  uint64_t written;
  char text[13];
} note_t;

typedef struct note_writer {
  uint64_t written;
  char letter;
} note_writer_t;

static void write_note(void* user, void* note) {
  note_writer_t* writer = user;
  note_t made = {.written = ++writer->written};
  memset(made.text, writer->letter, sizeof(made.text));
  memcpy(note, &made, sizeof(made));
}

// Processes 0 and 2 have no channel between them.
static void connect_in_a_row(const char* driver, jpp_transport_t** transports,
                             jpp_channel_t** channels) {
  static const uint64_t kBytes = 8;
  for (uint32_t p = 0; p < kNoteProcesses; ++p) {
    jpp_transport_options_t options = pair_options(driver, p, 500);
    options.num_processes = kNoteProcesses;
    ASSERT_OK(test_transport_create(&options, &transports[p]));
  }
  for (uint32_t i = 0; i < kNoteProcesses * kNoteProcesses; ++i) {
    uint32_t from = i / kNoteProcesses, to = i % kNoteProcesses;
    const void* address = NULL;
    size_t size = 0;
    if (from == to) continue;
    jpp_transport_address(transports[to], &address, &size);
    ASSERT_OK(jpp_transport_connect(transports[from], to, address, size));
  }
  for (uint32_t p = 0; p + 1 < kNoteProcesses; ++p) {
    jpp_channel_spec_t spec = pair_spec(NULL, p, 1, 1, &kBytes);
    spec.src_process = p;
    spec.dst_process = p + 1;
    ASSERT_OK(jpp_transport_open_channel(transports[p], &spec, &channels[2 * p]));
    ASSERT_OK(jpp_transport_open_channel(transports[p + 1], &spec, &channels[2 * p + 1]));
  }
}

static bool knows_notes(const jpp_transport_t* transport, uint64_t least) {
  for (uint32_t p = 0; p < kNoteProcesses; ++p) {
    const note_t* note = jpp_transport_note(transport, p);
    if (!note) return false;
    for (size_t i = 0; i < sizeof(note->text); ++i) {
      assert_int_equal(note->text[i], 'a' + p);
    }
    if (note->written < least) return false;
  }
  return true;
}

static void test_notes_reach_all_processes(void** state) {
  jpp_transport_t* transports[kNoteProcesses] = {0};
  jpp_channel_t* channels[2 * kNoteProcesses] = {0};
  note_writer_t writers[kNoteProcesses] = {0};
  connect_in_a_row(*state, transports, channels);
  for (uint32_t p = 0; p < kNoteProcesses; ++p) {
    writers[p].letter = (char)('a' + p);
    assert_null(jpp_transport_note(transports[p], 0));
    ASSERT_OK(
        jpp_transport_open_notes(transports[p], sizeof(note_t), write_note, &writers[p]));
  }
  ASSERT_FAILS(jpp_transport_open_notes(transports[0], 1, write_note, &writers[0]),
               JPP_INVALID_ARGUMENT, "expected notes of at least 1 byte, opened once");
  assert_null(jpp_transport_note(transports[0], kNoteProcesses));
  int64_t until = jpp__clock_now_ms() + 20000;
  for (uint32_t knowing = 0; knowing < kNoteProcesses;) {
    bool some = false;
    knowing = 0;
    for (uint32_t p = 0; p < kNoteProcesses; ++p) {
      jpp_transport_progress(transports[p], &some);
      knowing += knows_notes(transports[p], 3);
    }
    if (jpp__clock_now_ms() > until) fail_msg("waited in vain for notes");
  }
  assert_non_null(strstr(jpp_transport_peer_name(transports[0], 1), "127.0.0.1"));
  for (uint32_t c = 0; c < 2 * kNoteProcesses; ++c) jpp_channel_close(channels[c]);
  for (uint32_t p = 0; p < kNoteProcesses; ++p) jpp_transport_destroy(transports[p]);
}

static void test_notes_are_for_processes(void** state) {
  (void)state;
  jpp_transport_t* transport = NULL;
  note_writer_t writer = {0};
  jpp_transport_options_t options = {.struct_size = sizeof(options), .driver = "inproc"};
  ASSERT_OK(test_transport_create(&options, &transport));
  ASSERT_FAILS(jpp_transport_open_notes(transport, sizeof(note_t), write_note, &writer),
               JPP_UNSUPPORTED, "transport inproc connects no processes");
  assert_null(jpp_transport_note(transport, 0));
  assert_string_equal(jpp_transport_peer_name(transport, 0), "an unknown address");
  jpp_transport_destroy(transport);
}

static const struct CMUnitTest kTests[] = {
    cmocka_unit_test(test_notes_reach_all_processes),
    cmocka_unit_test(test_notes_are_for_processes),
};

int main(int argc, char** argv) {
  return pair_run_suite("transport_notes", kTests, sizeof(kTests) / sizeof(*kTests), argc,
                        argv);
}
