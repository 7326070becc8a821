// Notes: the progress of each process, passed from neighbour to neighbour. A heartbeat
// carries some of the notes that its sender knows, including its own; the receiver keeps
// the newer ones and passes them on. A note's version counts the notes of its process.
#include <string.h>

#include "transport/net.h"

enum {
  kMostBeat = 4096
};  // bytes of notes in a heartbeat, unless a single note is larger

// Precedes each note in a heartbeat; the note is padded to a multiple of 8 bytes.
typedef struct entry_head {
  uint64_t version;
  uint32_t process;
  uint32_t unused;
} entry_head_t;

static size_t padded(uint32_t size) { return ((size_t)size + 7) / 8 * 8; }

static size_t entry_size(const jpp_net_notes_t* notes) {
  return sizeof(entry_head_t) + padded(notes->size);
}

static char* note_of(const jpp_net_notes_t* notes, uint32_t process) {
  return notes->data + process * padded(notes->size);
}

jpp_status_t* jpp__net_open_notes(jpp_transport_t* transport, uint32_t size,
                                  jpp_transport_write_note_t write, void* user) {
  jpp_net_t* net = (jpp_net_t*)transport;
  jpp_net_notes_t* notes = &net->notes;
  if (notes->size || size == 0) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "expected notes of at least 1 byte, opened once; found %u, and %u opened before",
        size, notes->size);
  }
  uint32_t processes = transport->num_processes;
  size_t entry = sizeof(entry_head_t) + padded(size);
  notes->most = (uint32_t)(entry > kMostBeat ? 1 : kMostBeat / entry);
  if (notes->most > processes) notes->most = processes;
  notes->write = write;
  notes->user = user;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(processes, &notes->versions));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(processes * padded(size), &notes->data));
  for (uint32_t p = 0; p < processes; ++p) {
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(notes->most * entry, &net->peers[p].beat_data));
  }
  notes->size = size;
  return NULL;
}

const void* jpp__net_note(const jpp_transport_t* transport, uint32_t process) {
  const jpp_net_notes_t* notes = &((const jpp_net_t*)transport)->notes;
  bool known =
      notes->size && process < transport->num_processes && notes->versions[process];
  return known ? note_of(notes, process) : NULL;
}

void jpp__net_notes_deinit(jpp_net_t* net) {
  for (uint32_t p = 0; net->peers && p < net->base.num_processes; ++p) {
    jpp_free(net->peers[p].beat_data);
  }
  jpp_free(net->notes.versions);
  jpp_free(net->notes.data);
}

void jpp__net_write_note(jpp_net_t* net) {
  jpp_net_notes_t* notes = &net->notes;
  if (!notes->size) return;
  notes->write(notes->user, note_of(notes, net->base.process));
  ++notes->versions[net->base.process];
}

static void pack_entry(const jpp_net_notes_t* notes, uint32_t process, char* to) {
  entry_head_t head = {.version = notes->versions[process], .process = process};
  memcpy(to, &head, sizeof(head));
  memcpy(to + sizeof(head), note_of(notes, process), padded(notes->size));
}

// Packs this process' own note, which is the newest, and others in rotation.
uint32_t jpp__net_pack_notes(jpp_net_peer_t* peer, size_t* out_size) {
  const jpp_net_notes_t* notes = &peer->net->notes;
  uint32_t count = 0, processes = peer->net->base.num_processes;
  uint32_t own = peer->net->base.process;
  *out_size = 0;
  if (!notes->size) return 0;
  pack_entry(notes, own, peer->beat_data);
  ++count;
  for (uint32_t i = 0; i < processes && count < notes->most; ++i) {
    uint32_t process = peer->next_note;
    peer->next_note = (process + 1) % processes;
    if (process == own || process == peer->process || !notes->versions[process]) continue;
    pack_entry(notes, process, peer->beat_data + count * entry_size(notes));
    ++count;
  }
  *out_size = count * entry_size(notes);
  return count;
}

static const char* take_entry(jpp_net_t* net, const char* from) {
  jpp_net_notes_t* notes = &net->notes;
  entry_head_t head;
  memcpy(&head, from, sizeof(head));
  if (head.process >= net->base.num_processes) return "its note belongs to no process";
  // A process ignores notes about itself.
  if (head.process == net->base.process) return NULL;
  if (head.version <= notes->versions[head.process]) return NULL;
  notes->versions[head.process] = head.version;
  memcpy(note_of(notes, head.process), from + sizeof(head), padded(notes->size));
  return NULL;
}

const char* jpp__net_take_notes(jpp_net_t* net, const jpp_packet_t* packet,
                                const void* data) {
  // Notes are not open yet here, or at the peer.
  if (!net->notes.size || packet->count == 0) return NULL;
  size_t entry = entry_size(&net->notes);
  if (!data || packet->count > net->base.num_processes ||
      packet->size != packet->count * entry) {
    return "its notes are of another size";
  }
  for (uint32_t i = 0; i < packet->count; ++i) {
    const char* wrong = take_entry(net, (const char*)data + i * entry);
    if (wrong) return wrong;
  }
  return NULL;
}
