// Cores: the processors of a host, which the jobs on it share equally.
//
// `work` is the time that has passed for everything that runs: it advances with the clock
// while there are enough cores, and proportionally slower while more are needed. A job
// that takes time t on cores of its own ends when `work` has advanced by t.
#ifndef JPP_PREDICT_CORES_H_
#define JPP_PREDICT_CORES_H_

#include <stdint.h>

typedef struct jpp_cores {
  uint32_t count;  // 0: unlimited
  double load;     // cores needed now
  double now;      // the clock
  double work;
} jpp_cores_t;

// How fast `work` advances, at most 1.
static inline double jpp__cores_speed(const jpp_cores_t* cores) {
  if (!cores->count || cores->load <= cores->count) return 1;
  return cores->count / cores->load;
}

static inline void jpp__cores_advance(jpp_cores_t* cores, double now) {
  cores->work += (now - cores->now) * jpp__cores_speed(cores);
  cores->now = now;
}

#endif  // JPP_PREDICT_CORES_H_
