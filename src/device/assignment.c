// Adds a device assignment to a serialized CompileOptionsProto without parsing it:
// concatenated messages of protocol buffers parse as one message with merged embedded
// messages (protobuf.dev, "Encoding: Last One Wins"). The assignment is therefore written
// as a second CompileOptionsProto. The field numbers come from XLA's
// compile_options.proto and xla_data.proto.
#include "device/assignment.h"

#include "base/protobuf.h"

enum {
  kBuildOptions = 3,        // CompileOptionsProto.executable_build_options
  kNumPartitions = 5,       // ExecutableBuildOptionsProto.num_partitions
  kDeviceAssignment = 9,    // ExecutableBuildOptionsProto.device_assignment
  kReplicaCount = 1,        // DeviceAssignmentProto
  kComputationCount = 2,    // the same
  kComputationDevices = 3,  // the same, one for each partition
  kReplicaDeviceIds = 1,    // ComputationDevice
};

void jpp__assignment_append(const jpp_client_t* client,
                            const jpp_compile_request_t* request, jpp_str_t* out) {
  jpp_str_t assignment = {0}, build = {0};
  jpp__protobuf_put_number(&assignment, kReplicaCount, 1);
  jpp__protobuf_put_number(&assignment, kComputationCount, request->device_count);
  for (uint32_t i = 0; i < request->device_count; ++i) {
    jpp_str_t computation = {0};
    int64_t id = jpp_client_info(client)->global_devices[request->devices[i]].id;
    jpp__protobuf_put_number(&computation, kReplicaDeviceIds, (uint64_t)id);
    jpp__protobuf_put_message(&assignment, kComputationDevices, &computation);
  }
  jpp__protobuf_put_number(&build, kNumPartitions, request->device_count);
  jpp__protobuf_put_message(&build, kDeviceAssignment, &assignment);
  if (request->options_size) {
    jpp_str_append_n(out, request->options, request->options_size);
  }
  jpp__protobuf_put_message(out, kBuildOptions, &build);
}
