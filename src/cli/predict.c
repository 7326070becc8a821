// jaxpp predict: computes when the tasks of a plan file run, with task times from traces.
#include <sched.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/planfile.h"

static uint32_t count_cores(void) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 0;
  return (uint32_t)CPU_COUNT(&cores);
}

// Ranks share devices if their first devices are the same.
static jpp_status_t* find_devices(const jpp_planfile_contents_t* contents,
                                  uint32_t** out_devices) {
  uint32_t ranks = contents->planned->ranks;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(ranks, out_devices));
  for (uint32_t r = 0; r < ranks; ++r) {
    const int32_t* ids = contents->device_ids;
    uint32_t same = 0;
    while (ids[(size_t)same * contents->devices_per_rank] !=
           ids[(size_t)r * contents->devices_per_rank]) {
      ++same;
    }
    (*out_devices)[r] = same;
  }
  return NULL;
}

static jpp_status_t* predict_file(const jpp_cli_options_t* options,
                                  const jpp_planfile_contents_t* contents,
                                  const jpp_spans_t* trace,
                                  jpp_prediction_t** out_prediction) {
  uint32_t* devices = NULL;
  JPP_RETURN_IF_ERROR(find_devices(contents, &devices));
  jpp_machine_t machine = {
      .struct_size = sizeof(machine),
      .cores = options->cores,
      .threads = options->threads,
      .devices_per_rank = contents->devices_per_rank,
      .processes = options->processes,
      .call = options->call,
      .link = {.latency = options->latency, .bandwidth = options->bandwidth},
      .host = {.bandwidth = options->host_bandwidth},
      .rank_device = devices};
  if (!machine.cores && !strcmp(contents->platform, "cpu")) machine.cores = count_cores();
  jpp_predict_options_t predict = {.struct_size = sizeof(predict),
                                   .machine = &machine,
                                   .steps = options->steps,
                                   .steps_in_flight = contents->steps_in_flight};
  jpp_status_t* status =
      jpp_spans_predict(trace, contents->planned->plan, &predict, out_prediction);
  jpp_free(devices);
  return status;
}

static jpp_status_t* append_prediction(const jpp_cli_options_t* options,
                                       const jpp_prediction_t* prediction,
                                       jpp_str_t* out) {
  char* text = NULL;
  if (options->trace) {
    JPP_RETURN_IF_ERROR(jpp_prediction_to_trace(prediction, &text));
  } else if (options->json) {
    JPP_RETURN_IF_ERROR(jpp_prediction_print_json(prediction, &text));
  } else {
    JPP_RETURN_IF_ERROR(jpp_prediction_print(prediction, &text));
  }
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

jpp_status_t* jpp_cli_predict(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_planfile_t* file = NULL;
  jpp_spans_t* trace = NULL;
  jpp_prediction_t* prediction = NULL;
  if (options->trace) {
    JPP_RETURN_IF_ERROR(jpp_cli_refuse_flags(options, JPP_FLAG_JSON, "--trace"));
  }
  jpp_status_t* status = jpp_planfile_load(options->words[0], &file);
  if (!status) {
    status = jpp_cli_read_traces(options->words + 1, options->num_words - 1, &trace);
  }
  if (!status) status = predict_file(options, &file->contents, trace, &prediction);
  if (status && jpp_status_code(status) == JPP_PARSE_ERROR && trace) {
    status = jpp_status_annotate(status, "%s%s", options->words[1],
                                 options->num_words > 2 ? " or one that follows" : "");
  }
  if (!status) status = append_prediction(options, prediction, out);
  jpp_prediction_destroy(prediction);
  jpp_spans_destroy(trace);
  jpp_planfile_destroy(file);
  return status;
}
