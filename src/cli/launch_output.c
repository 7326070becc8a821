// The output of a job's processes: each line with its process's number as a prefix, and
// the whole output in a file for each process.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/launch.h"

enum { kRedrawMs = 2000 };

jpp_status_t* jpp__launch_open_log(const launch_job_t* job, launch_child_t* child) {
  const char* folder = job->options->log_dir;
  char path[4096];
  child->log = NULL;
  if (!folder) return NULL;
  mkdir(folder, 0777);
  snprintf(path, sizeof(path), "%s/process-%u.log", folder, child->number);
  child->log = fopen(path, "ae");
  return child->log ? NULL : jpp__launch_error(path);
}

static void write_line(const launch_child_t* child, launch_output_t* output,
                       size_t length) {
  fprintf(output->to, "[%u] ", child->number);
  fwrite(output->line, 1, length, output->to);
  if (!length || output->line[length - 1] != '\n') fputc('\n', output->to);
}

// A progress bar returns to the start of its line and redraws itself; only some of the
// redraws are shown.
static void redraw(const launch_child_t* child, launch_output_t* output, size_t length) {
  double now = jpp_cli_now_ms();
  if (!length || now - output->redrawn_ms < kRedrawMs) return;
  output->redrawn_ms = now;
  write_line(child, output, length);
}

// The end of the first line or drawing; NULL if it is incomplete.
static char* find_end(const launch_output_t* output) {
  for (size_t i = 0; i < output->length; ++i) {
    char* at = (char*)output->line + i;
    if (*at == '\n') return at;
    // A carriage return before a line feed, which may not have arrived yet, does not end
    // a drawing.
    if (*at == '\r' && i + 1 < output->length && at[1] != '\n' && at[1] != '\r')
      return at;
  }
  return NULL;
}

static void write_lines(const launch_child_t* child, launch_output_t* output, bool all) {
  char* end = NULL;
  while ((end = find_end(output)) != NULL) {
    size_t length = (size_t)(end - output->line);
    if (*end == '\n') {
      write_line(child, output, length + 1);
    } else {
      redraw(child, output, length);
    }
    output->length -= length + 1;
    memmove(output->line, end + 1, output->length);
  }
  if (output->length && (all || output->length == kLaunchLineSize)) {
    write_line(child, output, output->length);
    output->length = 0;
  }
  fflush(output->to);
}

void jpp__launch_read(const launch_child_t* child, launch_output_t* output) {
  char* to = output->line + output->length;
  ssize_t count = read(output->read_end, to, kLaunchLineSize - output->length);
  if (count < 0 && errno == EINTR) return;
  if (count > 0) {
    output->length += (size_t)count;
    if (child->log) {
      fwrite(to, 1, (size_t)count, child->log);
      fflush(child->log);
    }
  }
  write_lines(child, output, count <= 0);
  if (count > 0) return;
  close(output->read_end);
  output->read_end = -1;
}

void jpp__launch_close(launch_child_t* child) {
  for (int i = 0; i < 2; ++i) {
    launch_output_t* output = &child->outputs[i];
    if (output->read_end < 0) continue;
    write_lines(child, output, true);
    close(output->read_end);
    output->read_end = -1;
  }
  if (child->log) fclose(child->log);
  child->log = NULL;
}
