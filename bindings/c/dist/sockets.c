/* SPDX-License-Identifier: Apache-2.0 */
/* exchange() only notes the messages and sends what the system takes at once; wait() moves the rest. Each pair of ranks has a stream of bytes in
 * either direction, so that messages need no header: both sides know how long the next one is. */
#include "sockets.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* What wait() has still to move in one direction. */
typedef struct queue {
  fa_dist_message *messages;
  size_t count, capacity;
  size_t first;  /* the message that is under way */
  uint64_t done; /* bytes of it that have moved */
} queue;

struct sockets {
  int rank, num_ranks;
  int *ends;             /* (num_ranks) */
  queue *sends;          /* (num_ranks) */
  queue *receives;       /* (num_ranks) */
  struct pollfd *waited; /* (num_ranks) */
};

int socket_pairs_open(socket_pairs *pairs, int num_ranks) {
  const size_t count = (size_t)num_ranks * (size_t)num_ranks;
  pairs->num_ranks = num_ranks;
  pairs->ends = malloc(count * sizeof *pairs->ends);
  if (pairs->ends == NULL) return ENOMEM;
  for (size_t i = 0; i < count; ++i) pairs->ends[i] = -1;
  for (int a = 0; a < num_ranks; ++a) {
    for (int b = a + 1; b < num_ranks; ++b) {
      int both[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, both) != 0) {
        const int error = errno;
        socket_pairs_close(pairs);
        return error;
      }
      pairs->ends[a * num_ranks + b] = both[0];
      pairs->ends[b * num_ranks + a] = both[1];
    }
  }
  return 0;
}

void socket_pairs_close(socket_pairs *pairs) {
  for (int i = 0; i < pairs->num_ranks * pairs->num_ranks; ++i) {
    if (pairs->ends[i] >= 0) close(pairs->ends[i]);
  }
  free(pairs->ends);
  pairs->ends = NULL;
  pairs->num_ranks = 0;
}

sockets *sockets_open(socket_pairs *pairs, int rank) {
  const size_t count = (size_t)pairs->num_ranks;
  sockets *s = calloc(1, sizeof *s);
  if (s == NULL) return NULL;
  s->rank = rank;
  s->num_ranks = pairs->num_ranks;
  s->ends = malloc(count * sizeof *s->ends);
  s->sends = calloc(count, sizeof *s->sends);
  s->receives = calloc(count, sizeof *s->receives);
  s->waited = calloc(count, sizeof *s->waited);
  if (s->ends == NULL || s->sends == NULL || s->receives == NULL || s->waited == NULL) {
    s->num_ranks = 0; /* has taken none of the ends */
    sockets_close(s);
    return NULL;
  }
  for (int peer = 0; peer < s->num_ranks; ++peer) {
    int *end = &pairs->ends[rank * s->num_ranks + peer];
    s->ends[peer] = *end;
    *end = -1;
  }
  return s;
}

void sockets_close(sockets *s) {
  if (s == NULL) return;
  for (int peer = 0; peer < s->num_ranks; ++peer) {
    if (s->ends[peer] >= 0) close(s->ends[peer]);
    free(s->sends[peer].messages);
    free(s->receives[peer].messages);
  }
  free(s->ends);
  free(s->sends);
  free(s->receives);
  free(s->waited);
  free(s);
}

static int push(queue *q, const fa_dist_message *message) {
  if (q->count == q->capacity) {
    const size_t capacity = q->capacity == 0 ? 8 : 2 * q->capacity;
    fa_dist_message *messages = realloc(q->messages, capacity * sizeof *messages);
    if (messages == NULL) return 0;
    q->messages = messages;
    q->capacity = capacity;
  }
  q->messages[q->count++] = *message;
  return 1;
}

static int empty(const queue *q) { return q->first == q->count; }

/* Moves what can be moved without waiting. */
static fa_status move(queue *q, int end, int receive) {
  while (!empty(q)) {
    const fa_dist_message *m = &q->messages[q->first];
    char *data = (char *)m->data + q->done;
    const size_t left = (size_t)(m->bytes - q->done);
    const ssize_t moved = receive ? recv(end, data, left, MSG_DONTWAIT) : send(end, data, left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return FA_OK;
    if (moved <= 0) return FA_ERROR_TRANSPORT; /* the other end is closed */
    q->done += (uint64_t)moved;
    if (q->done == m->bytes) {
      q->done = 0;
      if (++q->first == q->count) q->first = q->count = 0;
    }
  }
  return FA_OK;
}

static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static fa_status sockets_exchange(void *user, const fa_dist_message *messages, int32_t num_messages, fa_stream stream) {
  sockets *s = user;
  fa_status status = FA_OK;
  (void)stream; /* of the CPU, where it is NULL */
  for (int32_t i = 0; i < num_messages; ++i) {
    const fa_dist_message *m = &messages[i];
    if (!push(m->receive ? &s->receives[m->peer] : &s->sends[m->peer], m)) return FA_ERROR_OUT_OF_MEMORY;
  }
  for (int peer = 0; peer < s->num_ranks && status == FA_OK; ++peer) status = move(&s->sends[peer], s->ends[peer], 0);
  return status;
}

static fa_status sockets_wait(void *user, int64_t timeout_ms) {
  sockets *s = user;
  const int64_t begin = now_ms();
  for (;;) {
    int pending = 0, ready;
    int64_t left;
    for (int peer = 0; peer < s->num_ranks; ++peer) {
      fa_status status = move(&s->sends[peer], s->ends[peer], 0);
      if (status == FA_OK) status = move(&s->receives[peer], s->ends[peer], 1);
      if (status != FA_OK) return status;
      s->waited[peer].events = (short)((empty(&s->sends[peer]) ? 0 : POLLOUT) | (empty(&s->receives[peer]) ? 0 : POLLIN));
      s->waited[peer].fd = s->waited[peer].events != 0 ? s->ends[peer] : -1;
      pending += s->waited[peer].events != 0;
    }
    if (pending == 0) return FA_OK;
    left = timeout_ms - (now_ms() - begin);
    if (left <= 0) return FA_ERROR_TRANSPORT;
    ready = poll(s->waited, (nfds_t)s->num_ranks, left < 1000000 ? (int)left : 1000000);
    if (ready < 0 && errno != EINTR) return FA_ERROR_TRANSPORT;
  }
}

/* Wakes this rank, and every other one that waits for it. The ends stay open: another thread may be using them. */
static void sockets_abort(void *user) {
  sockets *s = user;
  for (int peer = 0; peer < s->num_ranks; ++peer) {
    if (s->ends[peer] >= 0) shutdown(s->ends[peer], SHUT_RDWR);
  }
}

static fa_status sockets_status(void *user) {
  const sockets *s = user;
  for (int peer = 0; peer < s->num_ranks; ++peer) {
    struct pollfd end = {s->ends[peer], 0, 0};
    if (poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)) != 0) return FA_ERROR_TRANSPORT;
  }
  return FA_OK;
}

fa_dist_transport sockets_transport(sockets *s) {
  fa_dist_transport t;
  fa_dist_transport_init(&t, sizeof t);
  t.rank = s->rank;
  t.num_ranks = s->num_ranks;
  t.user = s;
  t.exchange = sockets_exchange;
  t.wait = sockets_wait;
  t.abort = sockets_abort;
  t.status = sockets_status;
  return t;
}
