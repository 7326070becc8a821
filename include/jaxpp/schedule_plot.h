// Pictures of a simulated schedule. The texts are freed with jpp_text_free().
//
// Threads: any thread, several at once, also on the same simulation.
#ifndef JAXPP_SCHEDULE_PLOT_H_
#define JAXPP_SCHEDULE_PLOT_H_

#include "jaxpp/schedule_simulate.h"

// One row a rank with its tasks: forwards, backwards (of inputs) and weight gradients in
// three colours, later stages of a rank darker, microbatch numbers where they fit,
// bubbles in the background's colour, streams one above the other; below each row what it
// keeps over time; title and legend. JPP_INVALID_ARGUMENT for more tasks than a picture
// can show (1,000,000).
JPP_API jpp_status_t* jpp_plot_svg(const jpp_simulation_t* simulation,
                                   char** out_text) JPP_MUST_USE;

// The same as a page of one file, without network: the wheel zooms, dragging moves, a
// task under the pointer is described.
JPP_API jpp_status_t* jpp_plot_html(const jpp_simulation_t* simulation,
                                    char** out_text) JPP_MUST_USE;

// A line a rank, and one more for each further stream, `columns` wide: forwards show the
// microbatch's last digit, backwards a letter, weight gradients a capital one, bubbles
// '.'. With `color` ANSI colours by kind.
JPP_API jpp_status_t* jpp_plot_text(const jpp_simulation_t* simulation, uint32_t columns,
                                    bool color, char** out_text) JPP_MUST_USE;

#endif  // JAXPP_SCHEDULE_PLOT_H_
