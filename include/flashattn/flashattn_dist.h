/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file flashattn_dist.h
 * @brief Context parallelism: attention over sequences whose rows are spread over several ranks.
 *
 * Each rank holds some rows of q, k, v and out. A plan, which every rank computes alike from the lengths of the documents, says
 * which rows these are. Forward and backward fetch the keys and values that the rank's queries see, run the kernels of
 * flashattn.h on them, and return the gradients of keys to the ranks that own the rows. Results equal those of one rank to
 * rounding.
 *
 *     fa_dist_problem problem;  fa_dist_problem_init(&problem, sizeof problem);
 *     problem.lengths = lengths; ...             the documents, heads, head_dim, mask and number of ranks
 *     fa_dist_layout layout;    fa_dist_plan(&problem, &layout);
 *     fa_dist dist;             fa_dist_create(&dist, ctx, nccl_comm, NULL);
 *     fa_dist_prepare(dist, layout, &att, &grads);                       once for each kind of call, collective
 *     fa_dist_forward(dist, layout, &att, NULL, 0, stream);              collective
 *     fa_dist_backward(dist, layout, &att, &grads, NULL, 0, stream);     collective
 *
 * Conventions are those of flashattn.h. "Collective" means that all ranks make the call, in the same order. Lengths are read on
 * the host when the plan is made; this is the exception to the rule that lengths are read on the device only.
 *
 * Messages travel by NCCL, over a communicator of the caller's, or through a table of functions, ::fa_dist_transport. On a CUDA
 * context calls only enqueue; the messages have a stream of their own, of high priority, which events order with the caller's stream.
 */
#ifndef FLASHATTN_FLASHATTN_DIST_H
#define FLASHATTN_FLASHATTN_DIST_H

#include "flashattn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  /** A message between ranks failed, timed out or was aborted. The ::fa_dist can only be destroyed. @since 0.1 */
  FA_ERROR_TRANSPORT = 303
};

/* ---------------------------------------------------------------------------------------------------------------------
 * Plan: which rank has which rows
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief How keys, values and their gradients travel. @since 0.1 */
typedef int32_t fa_dist_way;

enum {
  /** The plan chooses: ::FA_DIST_GATHER, since the other ways have partial results or overlap less. */
  FA_DIST_AUTO = 0,
  /** Stages of key heads. A stage fetches every key row that the rank sees, for a few key heads. Forward has no partial results.
   * With windows only the rows inside the windows travel (halo exchange). */
  FA_DIST_GATHER = 1,
  /** Stages of key rows, a ring: stage t fetches the rows that rank (r + t) % num_ranks owns, for all heads. Partial results are
   * merged in fp32. Needs less memory for keys when there are few key heads. On CUDA the kernels for fp32 results are slow ones, so
   * that ::FA_DIST_AUTO does not choose it. */
  FA_DIST_RING = 2,
  /** Each rank computes all rows of the cut documents for h_k / num_ranks of the key heads. Queries, keys and values travel to
   * these ranks, and results back (DeepSpeed-Ulysses). One stage, which overlaps whole documents only. h_k must be a multiple of
   * num_ranks. ::FA_DIST_AUTO does not choose it. */
  FA_DIST_ALL_TO_ALL = 3
};

/** @brief Bits of `fa_dist_problem.flags`. @since 0.1 */
enum {
  /** Rank r gets rows floor(r * total / num_ranks) to floor((r + 1) * total / num_ranks) - 1, so that the permutation is the
   * identity. For callers that cannot permute tokens; causal work is then not balanced. */
  FA_DIST_CONTIGUOUS = 1
};

/**
 * @brief What the plan needs to know. All ranks must give the same values.
 *
 * A document is one sequence of self-attention: its queries and keys are the same rows. A padded batch (b, s, h, d) is b
 * documents of s rows. The letters of shapes are those of ::fa_attention. @since 0.1
 */
typedef struct fa_dist_problem {
  /** sizeof(fa_dist_problem), as set by fa_dist_problem_init(). */
  uint32_t struct_size;
  /** ::FA_DIST_CONTIGUOUS or 0. */
  uint32_t flags;
  /** Rows of each document, at least 0, in host memory. All together at most 2^31 - 1. */
  const int64_t *lengths;
  /** Number of documents. */
  int64_t num_documents;
  /** h_q. */
  int64_t heads_q;
  /** h_k, a divisor of h_q. */
  int64_t heads_k;
  /** d. */
  int64_t head_dim;
  /** d_v. */
  int64_t head_dim_v;
  /** As `window_left` of ::fa_attention. */
  int64_t window_left;
  /** As `window_right` of ::fa_attention. */
  int64_t window_right;
  /** As `window` of ::fa_attention. */
  uint32_t window;
  /** An ::fa_mask_kind. Both alignments mean the same, because queries and keys are the same rows. */
  fa_mask_kind mask;
  /** dtype of q, k and v: ::FA_FLOAT32, ::FA_FLOAT16 or ::FA_BFLOAT16. */
  fa_dtype dtype;
  /** Number of ranks, 1 to 1024. */
  int32_t num_ranks;
  /** An ::fa_dist_way: ::FA_DIST_AUTO, or the way to take. */
  fa_dist_way way;
  /** ::FA_DIST_GATHER: number of stages, at most h_k; 0 = automatic: at least 64 MB of keys each and at most four, of which forward may
   * divide the first. Must be 0 for other ways. */
  int32_t num_stages;
} fa_dist_problem;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param problem The struct to fill.
 * @param size sizeof(fa_dist_problem) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_dist_problem_init(fa_dist_problem *problem, size_t size);

/** @brief Opaque result of fa_dist_plan(). It never changes, so that threads may share it. @since 0.1 */
typedef struct fa_dist_layout_s *fa_dist_layout;

/** @brief Consecutive rows of a document on one rank. This struct has no `struct_size` and never changes. @since 0.1 */
typedef struct fa_dist_piece {
  /** Number of the document. */
  int64_t document;
  /** First row of the piece, counted within the document. */
  int64_t row_begin;
  /** One past its last row. */
  int64_t row_end;
  /** First key, counted within the document, that a query of the piece sees. */
  int64_t key_begin;
  /** One past the last key that a query of the piece sees. */
  int64_t key_end;
  /** Row of the rank's tensors that holds row_begin. */
  int64_t local_row;
  /** The rank. */
  int32_t rank;
  /** 1 if the piece is the whole document, which then needs no other rank; else 0. */
  int32_t whole;
} fa_dist_piece;

/**
 * @brief Assigns rows to ranks and chooses the way.
 *
 * A pure function of `problem` without device or communication: every rank gets the same answer. The rules are:
 * - No rank gets more than ceil(total / num_ranks) rows.
 * - Documents are taken by work (visible pairs), the largest first. Each goes whole to a rank that has room for it and then has
 *   at most 33/32 of the mean work; the rank that still needs the most work per row comes first. A document for which there is no
 *   such rank is cut over as few ranks as these limits allow. Documents of less than 1/32 of the mean work are cut only where
 *   they do not fit.
 * - If a rank still has more than 33/32 of the mean work, the 1, 2, 4, ... largest documents are cut over all ranks first, until
 *   no rank has, or the best of these assignments is taken.
 * - ::FA_DIST_ALL_TO_ALL: documents are cut over all ranks.
 * - A causal document is cut zigzag: each of its m ranks gets chunk r and chunk 2m - 1 - r. Other documents, and those whose
 *   window is shorter than a rank's share, are cut into one chunk for each rank.
 * - If every length is a multiple of 16, and the total a multiple of 16 num_ranks and at least 1024 num_ranks, documents are cut at
 *   multiples of 16 only, which dropout needs.
 * - In a rank's tensors whole documents come first, by number, then the pieces of cut documents by number and row.
 *
 * @param problem The problem.
 * @param[out] out The new layout; NULL on failure.
 * @return ::FA_OK, or 1xx; ::FA_ERROR_OUT_OF_MEMORY. The text of a failure is in fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_dist_plan(const fa_dist_problem *problem, fa_dist_layout *out);

/**
 * @brief Destroys a layout.
 * @param layout A layout that no call is using, or NULL (no effect). @since 0.1
 */
FA_API void fa_dist_layout_destroy(fa_dist_layout layout);

/** @brief What a layout contains. The arrays belong to the layout and live as long as it does. @since 0.1 */
typedef struct fa_dist_layout_info {
  /** sizeof(fa_dist_layout_info), as set by fa_dist_layout_info_init(). */
  uint32_t struct_size;
  /** Number of ranks. */
  int32_t num_ranks;
  /** The ::fa_dist_way taken. */
  fa_dist_way way;
  /** Number of stages of the way; 0 if no document is cut. */
  int32_t num_stages;
  /** Rows of all documents. */
  int64_t total_rows;
  /** Number of elements of `pieces`. */
  int64_t num_pieces;
  /** (num_ranks + 1): rank r has positions rank_offsets[r] to rank_offsets[r + 1] - 1 of `permutation`. */
  const int64_t *rank_offsets;
  /** (total_rows): the global row at each position. Global rows count the documents one after another. */
  const int64_t *permutation;
  /** (total_rows): the position of each global row. */
  const int64_t *inverse;
  /** (num_pieces): sorted by rank, then by local_row. */
  const fa_dist_piece *pieces;
  /** (num_ranks): visible pairs that each rank computes, for one head; ::FA_DIST_ALL_TO_ALL: for all heads, divided by their
   * number. */
  const int64_t *work;
  /** (num_ranks): bytes that each rank receives in forward. 0 without cut documents. */
  const int64_t *forward_bytes;
  /** (num_ranks): bytes that each rank receives in backward if dq, dk and dv are asked for, without dlse and dsink. */
  const int64_t *backward_bytes;
  /** Work of the rank with the most work, divided by the mean; 1 if there is no work. */
  double imbalance;
  /** The reason for the way, for people to read. */
  char reason[320];
} fa_dist_layout_info;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param info The struct to fill.
 * @param size sizeof(fa_dist_layout_info) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_dist_layout_info_init(fa_dist_layout_info *info, size_t size);

/**
 * @brief Describes a layout.
 * @param layout The layout.
 * @param[in,out] info Initialised by fa_dist_layout_info_init(). The fields that its `struct_size` covers are written.
 * @return ::FA_OK or 1xx. The text of a failure is in fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_dist_layout_describe(fa_dist_layout layout, fa_dist_layout_info *info);

/**
 * @brief Copies one rank's rows out of a tensor with all rows. Not collective.
 *
 * Use it for tokens and position ids, once a batch, and for tensors such as q or lse.
 * @param layout The layout.
 * @param rank The rank whose rows are copied.
 * @param dimension The dimension that counts rows, such as 0 for (total, h, d) and 1 for lse, (h, total).
 * @param whole Source, in host memory, with total_rows rows in that dimension.
 * @param local Destination, in host memory, with the rank's rows in that dimension and the shape and dtype of `whole` otherwise.
 * Must not overlap the source.
 * @return ::FA_OK or 1xx. The text of a failure is in fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_dist_scatter_rows(fa_dist_layout layout, int32_t rank, int32_t dimension, const fa_tensor *whole,
                                      const fa_tensor *local);

/**
 * @brief Copies one rank's rows to their places in a tensor with all rows: the reverse of fa_dist_scatter_rows().
 * @param layout The layout.
 * @param rank The rank whose rows are copied.
 * @param dimension As for fa_dist_scatter_rows().
 * @param local Source.
 * @param whole Destination. Other ranks' rows are not written.
 * @return As fa_dist_scatter_rows(). @since 0.1
 */
FA_API fa_status fa_dist_gather_rows(fa_dist_layout layout, int32_t rank, int32_t dimension, const fa_tensor *local,
                                     const fa_tensor *whole);

/* ---------------------------------------------------------------------------------------------------------------------
 * Transport: functions of the caller that move bytes between ranks
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief One message of an exchange. This struct has no `struct_size` and never changes. @since 0.1 */
typedef struct fa_dist_message {
  /** The bytes to send, or the memory that receives them. */
  void *data;
  /** Number of bytes, at least 1. The peer's message has the same number. */
  uint64_t bytes;
  /** The other rank; never this one. */
  int32_t peer;
  /** 0: `data` is sent to `peer`; 1: `data` is received from it. */
  int32_t receive;
} fa_dist_message;

/**
 * @brief Functions of the caller that move bytes between ranks, over MPI, sockets or threads for example.
 *
 * On a CUDA context messages are in device memory. They follow the work that is in `stream` when `exchange` is called, and when
 * `wait` returns, work that is enqueued in `stream` later must find them done: a transport of the host synchronises the stream in
 * `exchange` and waits in `wait`.
 *
 * Each function returns ::FA_OK or any other status, which makes the library's call fail with ::FA_ERROR_TRANSPORT. The library
 * calls `exchange` and `wait` on the thread that made its call. All ranks make the same sequence of exchanges, except that a rank
 * without messages leaves an exchange out. Between two ranks, messages arrive in the order in which they were sent. @since 0.1
 */
typedef struct fa_dist_transport {
  /** sizeof(fa_dist_transport), as set by fa_dist_transport_init(). */
  uint32_t struct_size;
  /** This rank, 0 <= rank < num_ranks. */
  int32_t rank;
  /** Number of ranks. */
  int32_t num_ranks;
  /** Must be 0. */
  uint32_t reserved;
  /** First argument of the functions. */
  void *user;
  /**
   * Starts sends and receives as one group, so that their order cannot cause a deadlock. It may return before they are done;
   * memory of the messages stays untouched until `wait` returns. The array is valid during the call only. `stream` is the
   * stream of the library's call.
   */
  fa_status (*exchange)(void *user, const fa_dist_message *messages, int32_t num_messages, fa_stream stream);
  /** Returns when all exchanges that were started on this rank are done, or with a failure after `timeout_ms` milliseconds
   * without an end, or soon after `abort`. */
  fa_status (*wait)(void *user, int64_t timeout_ms);
  /** Makes pending and later calls of this rank fail soon and, where the transport can, those of the other ranks too. Called from
   * any thread, once at most. */
  void (*abort)(void *user);
  /** Whether the connections are alive, without waiting; called by fa_dist_status() from any thread. NULL = always ::FA_OK. */
  fa_status (*status)(void *user);
} fa_dist_transport;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param transport The struct to fill.
 * @param size sizeof(fa_dist_transport) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_dist_transport_init(fa_dist_transport *transport, size_t size);

/* ---------------------------------------------------------------------------------------------------------------------
 * One rank
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Opaque handle of one rank: a context and a transport. @since 0.1 */
typedef struct fa_dist_s *fa_dist;

/** @brief Settings of a new ::fa_dist. @since 0.1 */
typedef struct fa_dist_config {
  /** sizeof(fa_dist_config), as set by fa_dist_config_init(). */
  uint32_t struct_size;
  /** Must be 0. */
  uint32_t reserved;
  /** A transport of the caller's; the library keeps a copy of the struct. NULL = NCCL. */
  const fa_dist_transport *transport;
  /** Longest time in milliseconds that one wait for messages may take; 0 = 600000 (ten minutes). With NCCL on CUDA only
   * fa_dist_prepare() waits; for enqueued messages fa_dist_status() counts the time. */
  int64_t timeout_ms;
  /** The copy of NCCL that made the communicator, a handle of dlopen() that stays open as long as the ::fa_dist lives. NULL = NCCL
   * among the global symbols of the process, else a `libnccl.so.2` that the process has loaded. */
  void *nccl_library;
} fa_dist_config;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param config The struct to fill.
 * @param size sizeof(fa_dist_config) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_dist_config_init(fa_dist_config *config, size_t size);

/**
 * @brief Creates the handle of one rank. Not collective.
 *
 * NCCL is never loaded: the functions are those of the copy that made the communicator, see `nccl_library`. The communicator stays
 * the caller's, who must not use it for anything else while a call of this library enqueues. Rank and number of ranks are its own.
 * @param[out] out The new handle; NULL on failure.
 * @param ctx The context that computes; it must outlive the handle. Calls on the handle are calls on the context.
 * @param nccl_comm An `ncclComm_t` of the context's CUDA device, NCCL 2.14 or newer, blocking or not. NULL = config->transport. A CPU
 * context takes a communicator without a device (ncclCommCuDevice says -1), of a library that works in host memory.
 * @param config Settings; NULL = defaults.
 * @return ::FA_OK; 1xx; ::FA_ERROR_NOT_BUILT if the process has no NCCL; ::FA_ERROR_TRANSPORT; 3xx; ::FA_ERROR_OUT_OF_MEMORY. The text
 * of a failure is in fa_last_error(ctx), or in fa_last_error(NULL) if `ctx` is no usable handle. @since 0.1
 */
FA_API fa_status fa_dist_create(fa_dist *out, fa_context ctx, void *nccl_comm, const fa_dist_config *config);

/**
 * @brief Destroys a handle. It neither waits for other ranks nor aborts the transport. The work that it has enqueued completes.
 * @param dist A handle that no call is using, or NULL (no effect). @since 0.1
 */
FA_API void fa_dist_destroy(fa_dist dist);

/** @brief How a call would run on this rank. @since 0.1 */
typedef struct fa_dist_info {
  /** sizeof(fa_dist_info), as set by fa_dist_info_init(). */
  uint32_t struct_size;
  /** The status that the call would return, as far as it depends on this rank's arguments. */
  fa_status status;
  /** Size in bytes of the workspace that the call needs on this rank. */
  uint64_t workspace_bytes;
  /** Bytes that this rank receives. */
  uint64_t received_bytes;
  /** Bytes that this rank sends. */
  uint64_t sent_bytes;
  /** Number of stages. */
  int32_t num_stages;
  /** Number of calls of attention kernels. */
  int32_t num_launches;
  /** The way and its reason, or the reason for a `status` other than ::FA_OK. */
  char reason[320];
} fa_dist_info;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param info The struct to fill.
 * @param size sizeof(fa_dist_info) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_dist_info_init(fa_dist_info *info, size_t size);

/**
 * @brief Reports whether and how fa_dist_forward() or fa_dist_backward() would run on this rank. Not collective.
 * @param dist The handle.
 * @param layout The layout.
 * @param attention As for fa_dist_forward().
 * @param gradients NULL: forward; else backward, as for fa_dist_backward().
 * @param[in,out] info Initialised by fa_dist_info_init(). The fields that its `struct_size` covers are written.
 * @return The status that the call would return; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_dist_query(fa_dist dist, fa_dist_layout layout, const fa_attention *attention,
                               const fa_gradients *gradients, fa_dist_info *info);

/**
 * @brief Compares the layouts and arguments of all ranks. Collective; waits.
 *
 * It also loads the kernels and opens NCCL's connections, so that the calls after it only enqueue and can be captured in a graph. All
 * ranks capture the same calls, and launch their graphs in the same order.
 *
 * Required once before fa_dist_forward() or fa_dist_backward() with these layouts, shapes and options. Addresses and strides may
 * differ between ranks and between calls. Not compared are contents of tensors, slopes and sinks for example, and seeds given by
 * pointer. If arguments differ, or one rank refuses its own, every rank returns a failure whose text names the rank, the field
 * and both values. The handle remains usable.
 * @param dist The handle.
 * @param layout The layout.
 * @param attention As for fa_dist_forward().
 * @param gradients NULL: prepares forward alone; else forward and backward.
 * @return ::FA_OK; ::FA_ERROR_INVALID_ARGUMENT for a difference; the failure of this rank's own arguments;
 * ::FA_ERROR_TRANSPORT. @since 0.1
 */
FA_API fa_status fa_dist_prepare(fa_dist dist, fa_dist_layout layout, const fa_attention *attention,
                                 const fa_gradients *gradients);

/**
 * @brief Computes `out` and, if present, `lse` of this rank's rows. Collective.
 *
 * The tensors hold the rows of this rank, n = rank_offsets[rank + 1] - rank_offsets[rank], in the order of the layout: q
 * (n, h_q, d), k (n, h_k, d), v (n, h_k, d_v), out (n, h_q, d_v), lse (h_q, n). Lengths come from the layout: `cu_seqlens`,
 * `seqused` and `max_seqlen` are absent or 0. `mask` and `window` are those of the plan. `alibi_slopes` with a dimension b has one
 * row for each document of the plan.
 *
 * `bias` is that of the rank's rows, (1, h_q or 1, n, m): columns of a row are the keys of its document, from key 0 on, and m is at least
 * the length of the longest document of which the rank has rows. dtypes and strides are as for fa_forward().
 *
 * Dropout drops the same elements as on one rank.
 *
 * These fields are refused with ::FA_ERROR_UNSUPPORTED: `block_mask`, `block_counts`, `element_mask`, `slices`, `seqstart_k`,
 * `page_table`, `max_logit`, fp8 and int8. Where a document is cut, so are `alibi_slopes` with ::FA_DIST_RING, and with
 * ::FA_DIST_GATHER if a query sees keys after it; `dropout_p` with both if some document is cut at a row that is no multiple of 16;
 * and `bias` with ::FA_DIST_ALL_TO_ALL.
 *
 * A call that refuses its arguments (1xx, 2xx) has sent nothing; the other ranks then wait until their time-out or
 * fa_dist_abort(). Any later failure aborts a transport of the caller's, so that the other ranks fail too; with NCCL that is the
 * caller's decision (fa_dist_abort() on every rank).
 * @param dist The handle.
 * @param layout The layout.
 * @param attention The problem.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_dist_query().
 * @param stream As for fa_forward().
 * @return ::FA_OK, a failure of fa_forward(), or ::FA_ERROR_TRANSPORT. On CUDA with NCCL, fa_dist_status() reports messages that
 * fail later. @since 0.1
 */
FA_API fa_status fa_dist_forward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, void *workspace,
                                 size_t workspace_bytes, fa_stream stream);

/**
 * @brief Computes the gradients of this rank's rows. Collective.
 *
 * `out` and `lse` are results of fa_dist_forward(). Gradients of keys and values are summed in fp32, in an order that depends on
 * the layout only, and rounded once. `dsink` is summed over all ranks and is the same on each. The gradients that are asked for
 * are the same on every rank. `dbias` is shaped as the rank's `bias`, with zeros behind the last key of a row's document. Of a bias of one
 * head it is refused where a document is cut and ::FA_DIST_GATHER has stages of heads; the plan's `num_stages` 1 allows it.
 * @param dist The handle.
 * @param layout The layout.
 * @param attention The problem, as for fa_dist_forward().
 * @param gradients Incoming gradients and outputs, shaped as the rank's rows.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_dist_query().
 * @param stream As for fa_forward().
 * @return As fa_dist_forward(). @since 0.1
 */
FA_API fa_status fa_dist_backward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention,
                                  const fa_gradients *gradients, void *workspace, size_t workspace_bytes, fa_stream stream);

/**
 * @brief Computes attention over a KV cache whose rows are spread over the ranks. Collective.
 *
 * Every rank has all queries, (b, s_q, h_q, d), and some rows of the cache of each sequence in `k` and `v`, as many as it has, in any
 * order: its own `seqused_k`, `seqstart_k` and `page_table` say which, on the device. A query sees every row in use of every rank that
 * no mask hides. Each rank attends to its own rows, and all merge the results of all: every rank gets the whole `out` and `lse`. Results
 * of a rank are rounded to the dtype of `out` before they are merged in fp32. 8-bit caches, paged caches, softcap and `sink` are as in
 * fa_forward().
 *
 * `mask`, `window`, masks as data, `kv_indices` and `bias` are those of the rank's own rows. They mean what they mean in fa_forward() of
 * these rows alone, and may differ from rank to rank. If several new tokens have their rows at the end of one rank's, that rank gives
 * ::FA_MASK_CAUSAL and the others ::FA_MASK_NONE. If the new tokens are a tree, the rank that has its rows gives an `element_mask`.
 *
 * Refused with ::FA_ERROR_UNSUPPORTED are `cu_seqlens_q`, `alibi_slopes` (its distances would need positions), `dropout_p`, `score`,
 * ::FA_FLAG_SAME_BITS and `max_logit`.
 * @param dist The handle.
 * @param attention The queries, the rank's rows, and `out`.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_dist_decode_query().
 * @param stream As for fa_forward().
 * @return As fa_dist_forward(). @since 0.1
 */
FA_API fa_status fa_dist_decode(fa_dist dist, const fa_attention *attention, void *workspace, size_t workspace_bytes,
                                fa_stream stream);

/**
 * @brief Reports whether and how fa_dist_decode() would run on this rank. Not collective.
 * @param dist The handle.
 * @param attention As for fa_dist_decode().
 * @param[in,out] info As for fa_dist_query(); `num_stages` is 0.
 * @return The status that the call would return; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_dist_decode_query(fa_dist dist, const fa_attention *attention, fa_dist_info *info);

/**
 * @brief As fa_dist_prepare(), for fa_dist_decode(). Collective; waits.
 *
 * Required once for a shape of the queries and its options. The caches may differ between ranks.
 * @param dist The handle.
 * @param attention As for fa_dist_decode().
 * @return As fa_dist_prepare(). @since 0.1
 */
FA_API fa_status fa_dist_decode_prepare(fa_dist dist, const fa_attention *attention);

/**
 * @brief Whether the handle still works, without waiting. From any thread, also while a call runs on another one.
 *
 * With NCCL it asks for the communicator's asynchronous error, and whether enqueued messages are late: not done `timeout_ms` after the call
 * that enqueued them last. That time includes work before them in the stream. A caller who enqueues polls this function, because nothing
 * else tells of a dead rank.
 * @param dist The handle.
 * @return ::FA_OK, or ::FA_ERROR_TRANSPORT after a failure, an abort, or if the transport reports one. The text is in
 * fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_dist_status(fa_dist dist);

/**
 * @brief Ends the call that is running on the handle, if any, and makes later ones fail. From any thread.
 *
 * With NCCL it calls ncclCommAbort(), which ends enqueued messages and frees the communicator: the caller neither uses nor destroys it
 * any more. Only this function does so; a call that fails leaves the communicator alone. If a thread has been inside NCCL for a second, as
 * with a blocking communicator whose peers do not come, the communicator is aborted under it.
 * @param dist The handle.
 * @return ::FA_OK, or ::FA_ERROR_INVALID_ARGUMENT for no handle. @since 0.1
 */
FA_API fa_status fa_dist_abort(fa_dist dist);

#ifdef __cplusplus
}
#endif

#endif /* FLASHATTN_FLASHATTN_DIST_H */
