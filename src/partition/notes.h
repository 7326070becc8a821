// Formats the notes of the partitioner.
#ifndef JPP_PARTITION_NOTES_H_
#define JPP_PARTITION_NOTES_H_

#include "base/str.h"
#include "jaxpp/partition.h"

void jpp__note_append(jpp_str_t* str, const jpp_staged_t* staged,
                      const jpp_partition_note_t* note);

#endif  // JPP_PARTITION_NOTES_H_
