// Compiles, serializes, loads and executes programs through PJRT.
#include <string.h>

#include "base/alloc.h"
#include "device/hlo.h"
#include "device/pjrt/pjrt.h"

// A CompileOptionsProto: executable_build_options (3) {num_replicas (4): 1,
// num_partitions (5): 1}, compile_portable_executable (4): true.
static const char kOneDeviceOptions[] = "\x1a\x04\x20\x01\x28\x01\x20\x01";

jpp_status_t* jpp__pjrt_compile(jpp_client_t* base, const jpp_compile_request_t* request,
                                jpp_executable_t** out_executable) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  PJRT_Program program = {
      .struct_size = PJRT_Program_STRUCT_SIZE,
      .code = (char*)request->code,  // compilation only reads it
      .code_size = request->code_size,
      .format = request->format,
      .format_size = strlen(request->format),
  };
  JPP_PJRT_ARGS(Client_Compile, args);
  args.client = client->client;
  args.program = &program;
  args.compile_options = request->options ? request->options : kOneDeviceOptions;
  args.compile_options_size =
      request->options ? request->options_size : sizeof(kOneDeviceOptions) - 1;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(client->api,
                                       client->api->PJRT_Client_Compile(&args),
                                       JPP_INVALID_ARGUMENT, "compile"));
  *out_executable = (jpp_executable_t*)args.executable;
  return NULL;
}

// The program of a loaded executable; free it with release_program().
static jpp_status_t* borrow_program(const PJRT_Api* api, jpp_executable_t* executable,
                                    PJRT_Executable** out_program) {
  JPP_PJRT_ARGS(LoadedExecutable_GetExecutable, get);
  get.loaded_executable = (PJRT_LoadedExecutable*)executable;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api,
                                       api->PJRT_LoadedExecutable_GetExecutable(&get),
                                       JPP_INVALID_ARGUMENT, "executable"));
  *out_program = get.executable;
  return NULL;
}

static void release_program(const PJRT_Api* api, PJRT_Executable* program) {
  JPP_PJRT_ARGS(Executable_Destroy, destroy);
  destroy.executable = program;
  jpp__pjrt_ignore(api, api->PJRT_Executable_Destroy(&destroy));
}

jpp_status_t* jpp__pjrt_executable_result_count(jpp_client_t* base,
                                                jpp_executable_t* executable,
                                                uint32_t* out_count) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Executable_NumOutputs, outputs);
  JPP_RETURN_IF_ERROR(borrow_program(api, executable, &outputs.executable));
  jpp_status_t* status = jpp__pjrt_status(api, api->PJRT_Executable_NumOutputs(&outputs),
                                          JPP_INVALID_ARGUMENT, "result count");
  release_program(api, outputs.executable);
  if (!status) *out_count = (uint32_t)outputs.num_outputs;
  return status;
}

static jpp_status_t* add_loaded(jpp_pjrt_client_t* client,
                                PJRT_LoadedExecutable* executable) {
  pthread_mutex_lock(&client->loaded_lock);
  jpp_status_t* status = JPP_VEC_PUSH(&client->loaded, executable);
  pthread_mutex_unlock(&client->loaded_lock);
  return status;
}

// Where the program is in the list; its length if it was not loaded. The caller holds the
// lock.
static size_t find_loaded(const jpp_pjrt_client_t* client,
                          const PJRT_LoadedExecutable* executable) {
  size_t i = 0;
  while (i < client->loaded.count && client->loaded.data[i] != executable) ++i;
  return i;
}

static bool is_loaded(jpp_pjrt_client_t* client,
                      const PJRT_LoadedExecutable* executable) {
  pthread_mutex_lock(&client->loaded_lock);
  bool found = find_loaded(client, executable) < client->loaded.count;
  pthread_mutex_unlock(&client->loaded_lock);
  return found;
}

static void remove_loaded(jpp_pjrt_client_t* client,
                          const PJRT_LoadedExecutable* executable) {
  pthread_mutex_lock(&client->loaded_lock);
  size_t at = find_loaded(client, executable);
  if (at < client->loaded.count) {
    client->loaded.data[at] = client->loaded.data[--client->loaded.count];
  }
  pthread_mutex_unlock(&client->loaded_lock);
}

static jpp_status_t* serialize_program(const PJRT_Api* api, PJRT_Executable* program,
                                       void** out_bytes, size_t* out_size) {
  JPP_PJRT_ARGS(Executable_Serialize, args);
  args.executable = program;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Executable_Serialize(&args),
                                       JPP_UNSUPPORTED, "serialize"));
  jpp_status_t* status = jpp_alloc(args.serialized_bytes_size, out_bytes);
  if (!status) {
    memcpy(*out_bytes, args.serialized_bytes, args.serialized_bytes_size);
    *out_size = args.serialized_bytes_size;
  }
  args.serialized_executable_deleter(args.serialized_executable);
  return status;
}

// Plugins return a module, or a module (field 1) with its configuration.
static jpp_status_t* take_module(const PJRT_Program* program, void* bytes,
                                 void** out_bytes, size_t* out_size) {
  static const char kModule[] = "hlo", kWithConfig[] = "hlo_with_config";
  size_t size = program->format_size;
  *out_bytes = bytes;
  *out_size = program->code_size;
  if (size == strlen(kModule) && !memcmp(program->format, kModule, size)) return NULL;
  if (size == strlen(kWithConfig) && !memcmp(program->format, kWithConfig, size)) {
    return jpp__hlo_without_config(bytes, out_size);
  }
  return jpp_status_make(JPP_UNSUPPORTED, "compiled program: expected HLO, found %.*s",
                         (int)size, program->format);
}

jpp_status_t* jpp__pjrt_executable_hlo(jpp_client_t* base, jpp_executable_t* executable,
                                       void** out_bytes, size_t* out_size) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  PJRT_Program program = {.struct_size = PJRT_Program_STRUCT_SIZE};
  JPP_PJRT_ARGS(Executable_OptimizedProgram, args);
  args.program = &program;
  JPP_RETURN_IF_ERROR(borrow_program(api, executable, &args.executable));
  void* bytes = NULL;
  jpp_status_t* status =
      jpp__pjrt_status(api, api->PJRT_Executable_OptimizedProgram(&args), JPP_UNSUPPORTED,
                       "compiled program");
  if (!status) status = jpp_alloc(program.code_size, &bytes);
  if (!status) {
    program.code = bytes;
    status = jpp__pjrt_status(api, api->PJRT_Executable_OptimizedProgram(&args),
                              JPP_UNSUPPORTED, "compiled program");
  }
  if (!status) status = take_module(&program, bytes, out_bytes, out_size);
  if (status) jpp_free(bytes);
  release_program(api, args.executable);
  return status;
}

static jpp_status_t* read_devices(const PJRT_Api* api, PJRT_LoadedExecutable* executable,
                                  PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  args->executable = executable;
  return jpp__pjrt_status(api, api->PJRT_LoadedExecutable_AddressableDevices(args),
                          JPP_UNSUPPORTED, "devices of a program");
}

// XLA's plugin for CPUs loses the order between a loop's collectives and those outside
// when it loads a program. Where data does not order them, the devices run them in
// different orders and wait for each other; after 40 s the plugin ends the process
// (jaxlib 0.10.2).
static jpp_status_t* check_order(jpp_pjrt_client_t* client,
                                 jpp_executable_t* executable) {
  JPP_PJRT_ARGS(LoadedExecutable_AddressableDevices, args);
  if (strcmp(client->base.info.platform_name, "cpu") != 0) return NULL;
  JPP_RETURN_IF_ERROR(
      read_devices(client->api, (PJRT_LoadedExecutable*)executable, &args));
  if (args.num_addressable_devices == 1) return NULL;
  void* module = NULL;
  size_t size = 0;
  bool ordered = false;
  JPP_RETURN_IF_ERROR(
      jpp__pjrt_executable_hlo(&client->base, executable, &module, &size));
  jpp_status_t* status = jpp__hlo_orders_collectives(module, size, &ordered);
  jpp_free(module);
  if (status || ordered) return status;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "serialize: the plugin would lose the order of the collectives");
}

jpp_status_t* jpp__pjrt_executable_serialize(jpp_client_t* base,
                                             jpp_executable_t* executable,
                                             void** out_bytes, size_t* out_size) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  const PJRT_Api* api = client->api;
  PJRT_Executable* program = NULL;
  // XLA's plugin for CPUs would leave out the program's functions.
  if (is_loaded(client, (PJRT_LoadedExecutable*)executable)) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "serialize: expected a program that was compiled, found one "
                           "that was loaded");
  }
  JPP_RETURN_IF_ERROR(check_order(client, executable));
  JPP_RETURN_IF_ERROR(borrow_program(api, executable, &program));
  jpp_status_t* status = serialize_program(api, program, out_bytes, out_size);
  release_program(api, program);
  return status;
}

jpp_status_t* jpp__pjrt_executable_memory(jpp_client_t* base,
                                          jpp_executable_t* executable,
                                          jpp_executable_memory_t* out_memory) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Executable_GetCompiledMemoryStats, args);
  JPP_RETURN_IF_ERROR(borrow_program(api, executable, &args.executable));
  jpp_status_t* status =
      jpp__pjrt_status(api, api->PJRT_Executable_GetCompiledMemoryStats(&args),
                       JPP_UNSUPPORTED, "memory of a program");
  release_program(api, args.executable);
  if (status) return status;
  *out_memory =
      (jpp_executable_memory_t){.arguments = (uint64_t)args.argument_size_in_bytes,
                                .results = (uint64_t)args.output_size_in_bytes,
                                .donated = (uint64_t)args.alias_size_in_bytes,
                                .temporary = (uint64_t)args.temp_size_in_bytes,
                                .code = (uint64_t)args.generated_code_size_in_bytes};
  return NULL;
}

// A plugin whose API does not have the options yet ignores them.
static jpp_status_t* check_devices(const jpp_pjrt_client_t* client,
                                   const jpp_compile_request_t* request,
                                   PJRT_LoadedExecutable* executable) {
  JPP_PJRT_ARGS(LoadedExecutable_AddressableDevices, args);
  JPP_RETURN_IF_ERROR(read_devices(client->api, executable, &args));
  bool same = args.num_addressable_devices == request->device_count;
  for (uint32_t i = 0; same && i < request->device_count; ++i) {
    same = args.addressable_devices[i] == client->devices[request->devices[i]];
  }
  if (same) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "load: expected the plugin to load the program for the devices "
                         "of the request, found others");
}

jpp_status_t* jpp__pjrt_executable_load(jpp_client_t* base,
                                        const jpp_compile_request_t* request,
                                        const void* bytes, size_t size,
                                        jpp_executable_t** out_executable) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  JPP_PJRT_ARGS(Executable_DeserializeAndLoad, args);
  args.client = client->client;
  args.serialized_executable = bytes;
  args.serialized_executable_size = size;
  if (request->device_count) {
    args.overridden_serialized_compile_options = request->options;
    args.overridden_serialized_compile_options_size = request->options_size;
  }
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(
      client->api, client->api->PJRT_Executable_DeserializeAndLoad(&args),
      JPP_INVALID_ARGUMENT, "load"));
  jpp_executable_t* executable = (jpp_executable_t*)args.loaded_executable;
  jpp_status_t* status = NULL;
  if (request->device_count) {
    status = check_devices(client, request, args.loaded_executable);
  }
  if (!status) status = add_loaded(client, args.loaded_executable);
  if (status) {
    jpp__pjrt_executable_destroy(base, executable);
    return status;
  }
  *out_executable = executable;
  return NULL;
}

void jpp__pjrt_executable_destroy(jpp_client_t* base, jpp_executable_t* executable) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  const PJRT_Api* api = client->api;
  JPP_PJRT_ARGS(LoadedExecutable_Destroy, args);
  args.executable = (PJRT_LoadedExecutable*)executable;
  remove_loaded(client, args.executable);
  jpp__pjrt_ignore(api, api->PJRT_LoadedExecutable_Destroy(&args));
}

static bool buffer_is_deleted(const PJRT_Api* api, jpp_buffer_t* buffer) {
  JPP_PJRT_ARGS(Buffer_IsDeleted, args);
  args.buffer = (PJRT_Buffer*)buffer;
  PJRT_Error* error = api->PJRT_Buffer_IsDeleted(&args);
  jpp__pjrt_ignore(api, error);
  return !error && args.is_deleted;
}

// Plugins have no error code for a deleted argument, so this searches for one afterwards.
// It applies only to executions that were refused: one that failed while running has
// consumed its own donations.
static jpp_status_t* execute_explain(const PJRT_Api* api, const jpp_execute_t* execute,
                                     jpp_status_t* status) {
  for (uint32_t i = 0; i < execute->device_count; ++i) {
    for (uint32_t k = 0; k < execute->arg_count; ++k) {
      if (!buffer_is_deleted(api, execute->args[i][k])) continue;
      jpp_status_t* donated = jpp_status_make(
          JPP_DONATED_ERROR,
          "argument %u of device row %u was donated or deleted before: %s", k, i,
          jpp_status_message(status));
      jpp_status_free(status);
      return donated;
    }
  }
  return status;
}

static jpp_status_t* check_device_count(const jpp_client_t* client,
                                        const jpp_execute_t* execute) {
  if (execute->device_count == 1 || !client->info.runs_in_call) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "execute: expected a program for one device, because the client "
                         "was made with asynchronous=false, found one for %u",
                         execute->device_count);
}

jpp_status_t* jpp__pjrt_execute(jpp_client_t* base, const jpp_execute_t* execute) {
  const jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  JPP_RETURN_IF_ERROR(check_device_count(base, execute));
  PJRT_ExecuteOptions options = {.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE};
  PJRT_LoadedExecutable_Execute_Args args = {
      .struct_size = PJRT_LoadedExecutable_Execute_Args_STRUCT_SIZE,
      .executable = (PJRT_LoadedExecutable*)execute->executable,
      .options = &options,
      .argument_lists = (PJRT_Buffer* const* const*)execute->args,
      .num_devices = execute->device_count,
      .num_args = execute->arg_count,
      .output_lists = (PJRT_Buffer * * const*)execute->results,
      .device_complete_events = (PJRT_Event**)execute->events,
      .execute_device = execute->device < 0 ? NULL : client->devices[execute->device],
  };
  PJRT_Error* error = client->api->PJRT_LoadedExecutable_Execute(&args);
  if (!error) return NULL;
  // A plugin may run small programs inside the call, so the program itself may have
  // failed.
  bool refused =
      jpp__pjrt_error_code(client->api, error) == PJRT_Error_Code_INVALID_ARGUMENT;
  jpp_status_code_t code = refused ? JPP_INVALID_ARGUMENT : JPP_EXECUTION_ERROR;
  jpp_status_t* status = jpp__pjrt_status(client->api, error, code, "execute");
  return refused ? execute_explain(client->api, execute, status) : status;
}
