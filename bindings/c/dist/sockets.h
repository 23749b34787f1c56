/* SPDX-License-Identifier: Apache-2.0 */
/* A transport for fa_dist between processes of one host: a pair of connected sockets for every two ranks, and memory of the host. When a process
 * ends, however it ends, the system closes its sockets, and the others see that. */
#ifndef FA_DIST_SOCKETS_H
#define FA_DIST_SOCKETS_H

#include <flashattn/flashattn_dist.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The ends of all pairs, made before the processes of the ranks are. */
typedef struct socket_pairs {
  int num_ranks;
  int *ends; /* (num_ranks, num_ranks): the end of the first rank on its way to the second; -1 for none */
} socket_pairs;

/* Zero on success, else errno; nothing is open then. */
int socket_pairs_open(socket_pairs *pairs, int num_ranks);
/* Closes all ends that no rank has taken. */
void socket_pairs_close(socket_pairs *pairs);

/* The side of one rank. Its functions are called as fa_dist_transport says: `abort` and `status` from any thread. */
typedef struct sockets sockets;

/* Takes the ends of `rank`; NULL without memory. The process of a rank calls socket_pairs_close() afterwards: an end that is open in two
 * processes does not close with one of them. */
sockets *sockets_open(socket_pairs *pairs, int rank);
void sockets_close(sockets *s);
/* It lives as long as `s`. */
fa_dist_transport sockets_transport(sockets *s);

#ifdef __cplusplus
}
#endif

#endif
