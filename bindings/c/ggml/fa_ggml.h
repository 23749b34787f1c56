/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's flash_attn_ext by libflashattn, without a change of ggml: a graph gets a node of the kind `custom` in its place. The library is opened
 * at run time, and computes with the threads with which ggml computes the graph. */
#ifndef FA_GGML_H
#define FA_GGML_H

#include <ggml.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library, and the room where ggml's threads meet. One for each graph that is computed at the same time as others. */
typedef struct fa_ggml fa_ggml;

/* Opens `library` (NULL: libflashattn.so.0) for graphs that at most `threads` threads compute. NULL on failure, with a sentence in `error`. */
fa_ggml *fa_ggml_open(const char *library, int threads, char *error, size_t error_size);
void fa_ggml_close(fa_ggml *fa);

/* In place of ggml_flash_attn_ext, with the same arguments and the same result: q (head_dim, rows, heads, batch) F32; k, v (head_dim, keys,
 * heads, batch) F32, F16 or BF16; mask (keys, rows, heads or 1, batch or 1) F16 or NULL. `sinks` (heads) F32 or NULL. The result is
 * (head_dim, heads, rows, batch) F32. Returns NULL, with a sentence in fa_ggml_error(), where the library cannot do it: keys and values that
 * are quantised, a mask that is shared by some heads only, max_bias. Then call ggml's own. */
struct ggml_tensor *fa_ggml_flash_attn_ext(fa_ggml *fa, struct ggml_context *ctx, struct ggml_tensor *q, struct ggml_tensor *k,
                                           struct ggml_tensor *v, struct ggml_tensor *mask, struct ggml_tensor *sinks,
                                           float scale, float max_bias, float logit_softcap);

/* What the last failure was, "" if there was none. A node that fails while a graph is computed fills its result with NaN: ggml's nodes return
 * no status. */
const char *fa_ggml_error(const fa_ggml *fa);

#ifdef __cplusplus
}
#endif

#endif
