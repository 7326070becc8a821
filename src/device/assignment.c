// Adds a device assignment to a serialized CompileOptionsProto without parsing it:
// concatenated messages of protocol buffers parse as one message with merged embedded
// messages (protobuf.dev, "Encoding: Last One Wins"). The assignment is therefore written
// as a second CompileOptionsProto. The field numbers come from XLA's
// compile_options.proto and xla_data.proto.
#include "device/assignment.h"

enum {
  kBuildOptions = 3,        // CompileOptionsProto.executable_build_options
  kNumPartitions = 5,       // ExecutableBuildOptionsProto.num_partitions
  kDeviceAssignment = 9,    // ExecutableBuildOptionsProto.device_assignment
  kReplicaCount = 1,        // DeviceAssignmentProto
  kComputationCount = 2,    // the same
  kComputationDevices = 3,  // the same, one for each partition
  kReplicaDeviceIds = 1,    // ComputationDevice
};
enum { kVarint = 0, kLengthDelimited = 2 };

static void append_varint(jpp_str_t* out, uint64_t number) {
  do {
    char byte = (char)((number & 0x7f) | (number > 0x7f ? 0x80 : 0));
    jpp_str_append_n(out, &byte, 1);
    number >>= 7;
  } while (number);
}

static void append_number(jpp_str_t* out, uint32_t field, uint64_t number) {
  append_varint(out, field << 3 | kVarint);
  append_varint(out, number);
}

// Appends `message` and empties it.
static void append_message(jpp_str_t* out, uint32_t field, jpp_str_t* message) {
  append_varint(out, field << 3 | kLengthDelimited);
  append_varint(out, message->length);
  jpp_str_append_n(out, message->data, message->length);
  if (message->error && !out->error) {
    out->error = message->error;
    message->error = NULL;
  }
  jpp_str_deinit(message);
}

void jpp__assignment_append(const jpp_client_t* client,
                            const jpp_compile_request_t* request, jpp_str_t* out) {
  jpp_str_t assignment = {0}, build = {0};
  append_number(&assignment, kReplicaCount, 1);
  append_number(&assignment, kComputationCount, request->device_count);
  for (uint32_t i = 0; i < request->device_count; ++i) {
    jpp_str_t computation = {0};
    int64_t id = jpp_client_info(client)->global_devices[request->devices[i]].id;
    append_number(&computation, kReplicaDeviceIds, (uint64_t)id);
    append_message(&assignment, kComputationDevices, &computation);
  }
  append_number(&build, kNumPartitions, request->device_count);
  append_message(&build, kDeviceAssignment, &assignment);
  if (request->options_size) {
    jpp_str_append_n(out, request->options, request->options_size);
  }
  append_message(out, kBuildOptions, &build);
}
