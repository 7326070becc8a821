// Marks what libjaxpp.so exports; everything else is hidden.
#ifndef JAXPP_EXPORT_H_
#define JAXPP_EXPORT_H_

#ifdef __cplusplus
#define JPP_API extern "C" __attribute__((visibility("default")))
#else
#define JPP_API __attribute__((visibility("default")))
#endif
#define JPP_PRINTF(format_index, first_arg) \
  __attribute__((format(printf, format_index, first_arg)))
#define JPP_MUST_USE __attribute__((warn_unused_result))
// Marks a pointer parameter that may be NULL (jaxpp/status.h).
#define JPP_OPTIONAL

#endif  // JAXPP_EXPORT_H_
