// The output of a job's processes: each line with its process's number as a prefix, and
// the whole output in a file for each process.
//
// A line that exceeds the buffer is written in parts, without a new prefix. When another
// process writes before its end, the line is broken there, and its rest becomes a line.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/launch.h"

enum { kRedrawMs = 2000, kLogPathSize = 4096 };

static void name_log(const launch_job_t* job, const launch_child_t* child,
                     char path[kLogPathSize]) {
  snprintf(path, kLogPathSize, "%s/process-%u.log", job->options->log_dir, child->number);
}

jpp_status_t* jpp__launch_open_log(const launch_job_t* job, launch_child_t* child) {
  const char* folder = job->options->log_dir;
  char path[kLogPathSize];
  child->log = NULL;
  child->log_lost = false;
  if (!folder) return NULL;
  mkdir(folder, 0777);
  name_log(job, child, path);
  child->log = fopen(path, "ae");
  return child->log ? NULL : jpp__launch_error(path);
}

// --- Output that cannot be written ----------------------------------------------------

static void note_lost_log(const launch_job_t* job, launch_child_t* child) {
  char path[kLogPathSize];
  if (child->log_lost) return;
  child->log_lost = true;
  const char* why = strerror(errno);
  name_log(job, child, path);
  fprintf(stderr, "jaxpp launch: %s: %s; it lacks output of the process\n", path, why);
}

// Standard error has no place for a message about itself. A reader that has closed the
// pipe wants no more output.
static void note_lost_output(launch_job_t* job, const launch_output_t* output) {
  if (output->to != stdout || job->lost_output || errno == EPIPE) return;
  job->lost_output = errno;
  fprintf(stderr, "jaxpp launch: standard output: %s; it lacks output of the processes\n",
          strerror(errno));
}

static void flush_output(launch_job_t* job, const launch_output_t* output) {
  bool written = !ferror(output->to);
  if (fflush(output->to) != 0 || !written) note_lost_output(job, output);
}

static void write_log(const launch_job_t* job, launch_child_t* child, const char* text,
                      size_t length) {
  if (!child->log) return;
  bool written = fwrite(text, 1, length, child->log) == length;
  if (fflush(child->log) != 0 || !written) note_lost_log(job, child);
}

// --- Lines ----------------------------------------------------------------------------

void jpp__launch_prepare_output(launch_job_t* job) {
  struct stat out = {0}, error = {0};
  bool known = fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &error) == 0;
  job->one_stream = known && out.st_dev == error.st_dev && out.st_ino == error.st_ino;
}

// The output that has begun a line of the same stream, or NULL.
static launch_output_t** open_line(launch_job_t* job, const launch_output_t* output) {
  return &job->open[output->to == stderr && !job->one_stream];
}

static void begin_line(launch_job_t* job, const launch_child_t* child,
                       launch_output_t* output) {
  launch_output_t** open = open_line(job, output);
  if (*open == output) return;
  if (*open) fputc('\n', output->to);
  fprintf(output->to, "[%u] ", child->number);
  *open = output;
}

static void write_line(launch_job_t* job, const launch_child_t* child,
                       launch_output_t* output, size_t length) {
  begin_line(job, child, output);
  fwrite(output->line, 1, length, output->to);
  if (!length || output->line[length - 1] != '\n') fputc('\n', output->to);
  *open_line(job, output) = NULL;
}

// The number of bytes before a character at the end that is incomplete, if there is one.
static size_t whole_characters(const char* text, size_t length) {
  for (size_t back = 1; back <= 3 && back <= length; ++back) {
    unsigned char byte = (unsigned char)text[length - back];
    if ((byte & 0xC0) == 0x80) continue;
    size_t size = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return size > back ? length - back : length;
  }
  return length;
}

// Writes the start of a line whose end has not arrived.
static void write_part(launch_job_t* job, const launch_child_t* child,
                       launch_output_t* output) {
  size_t length = whole_characters(output->line, output->length);
  if (!length) return;
  begin_line(job, child, output);
  fwrite(output->line, 1, length, output->to);
  output->length -= length;
  memmove(output->line, output->line + length, output->length);
}

void jpp__launch_show_partial(launch_job_t* job, const launch_child_t* child,
                              launch_output_t* output) {
  if (memchr(output->line, '\r', output->length)) return;
  write_part(job, child, output);
  flush_output(job, output);
}

// A progress bar returns to the start of its line and redraws itself; only some of the
// redraws are shown.
static void redraw(launch_job_t* job, const launch_child_t* child,
                   launch_output_t* output, size_t length) {
  double now = jpp_cli_now_ms();
  if (!length || now - output->redrawn_ms < kRedrawMs) return;
  output->redrawn_ms = now;
  write_line(job, child, output, length);
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

static void write_lines(launch_job_t* job, const launch_child_t* child,
                        launch_output_t* output, bool all) {
  char* end = NULL;
  while ((end = find_end(output)) != NULL) {
    size_t length = (size_t)(end - output->line);
    if (*end == '\n') {
      write_line(job, child, output, length + 1);
    } else {
      redraw(job, child, output, length);
    }
    output->length -= length + 1;
    memmove(output->line, end + 1, output->length);
  }
  if (all && (output->length || *open_line(job, output) == output)) {
    write_line(job, child, output, output->length);
    output->length = 0;
  } else if (output->length == kLaunchLineSize) {
    write_part(job, child, output);
  }
  flush_output(job, output);
}

void jpp__launch_read(launch_job_t* job, launch_child_t* child, launch_output_t* output) {
  char* to = output->line + output->length;
  ssize_t count = read(output->read_end, to, kLaunchLineSize - output->length);
  if (count < 0 && errno == EINTR) return;
  if (count > 0) {
    output->length += (size_t)count;
    write_log(job, child, to, (size_t)count);
  }
  write_lines(job, child, output, count <= 0);
  if (job->lent) jpp__launch_show_partial(job, child, output);
  if (count > 0) return;
  close(output->read_end);
  output->read_end = -1;
}

void jpp__launch_close(launch_job_t* job, launch_child_t* child) {
  for (int i = 0; i < 2; ++i) {
    launch_output_t* output = &child->outputs[i];
    if (output->read_end < 0) continue;
    write_lines(job, child, output, true);
    close(output->read_end);
    output->read_end = -1;
  }
  if (child->log && fclose(child->log) != 0) note_lost_log(job, child);
  child->log = NULL;
}
