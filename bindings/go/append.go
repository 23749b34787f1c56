// SPDX-License-Identifier: Apache-2.0

package flashattn

// #include "shim.h"
import "C"

// Append describes new keys and values for a KV cache, and the rotary embedding of new keys and queries. flashattn.h documents shapes and meaning
// of each field (fa_append).
type Append struct {
	// New rows: (batch, new rows, heads, head_dim), or (total, heads, head_dim) with CuSeqlens. V and VCache may be absent together.
	K, V Tensor
	// Outputs, of which only the new rows are written: (batch, rows, heads, head_dim) or, paged, (pages, page size, heads, head_dim); the dtype of K,
	// Float8 or int8.
	KCache, VCache Tensor

	PageTable Tensor // (batch, max pages) int32
	Offsets   Tensor // (batch) int32: rows that each sequence has in the cache already; negative leaves a sequence out; absent = none
	CuSeqlens Tensor // packed new rows: (batch + 1) int32 or int64
	SeqUsed   Tensor // (batch) int32: number of used new rows of each sequence
	SeqUsedK  Tensor // output, (batch) int32: rows that each sequence has afterwards, for SeqUsedK of the next Attention; may be absent

	Q, QOut              Tensor // queries of the new rows; rotated into QOut, or in place if QOut is absent
	RotaryCos, RotarySin Tensor // (positions, rotary_dim / 2); absent = nothing is rotated
	RotaryPositions      Tensor // (batch, new rows) or (total), int32 or int64; absent = Offsets + row
	Interleaved          bool   // a rotary pair is columns 2c and 2c + 1 instead of c and c + rotary_dim / 2

	// Descales of a Float8 or int8 cache, float32. Per sequence and head, (batch, heads), they are inputs. Per row and head, in the cache's shape
	// without head_dim, they are outputs.
	KDescale, VDescale Tensor
}

// AppendKV rotates new rows and writes them to a cache.
func (ctx *Context) AppendKV(a Append) error { return ctx.append(&a, C.GO_RUN, nil) }

// PrepareAppend loads the kernels that AppendKV needs. See PrepareForward.
func (ctx *Context) PrepareAppend(a Append) error { return ctx.append(&a, C.GO_PREPARE, nil) }

// QueryAppend reports how AppendKV would run, or why it would not. It reads no tensor data.
func (ctx *Context) QueryAppend(a Append) (Plan, error) {
	return plan(func(info *C.fa_plan_info) error { return ctx.append(&a, C.GO_QUERY, info) })
}

func (ctx *Context) append(a *Append, what C.int, info *C.fa_plan_info) error {
	if ctx.handle == nil {
		return errClosed
	}
	var raw C.fa_append
	C.fa_append_init(&raw, C.sizeof_fa_append)
	if a.Interleaved {
		raw.flags |= C.FA_APPEND_INTERLEAVED
	}
	err := ctx.fill([]named{
		{"K", &a.K, &raw.k}, {"V", &a.V, &raw.v}, {"KCache", &a.KCache, &raw.k_cache}, {"VCache", &a.VCache, &raw.v_cache},
		{"PageTable", &a.PageTable, &raw.page_table}, {"Offsets", &a.Offsets, &raw.offsets},
		{"CuSeqlens", &a.CuSeqlens, &raw.cu_seqlens}, {"SeqUsed", &a.SeqUsed, &raw.seqused},
		{"SeqUsedK", &a.SeqUsedK, &raw.seqused_k}, {"Q", &a.Q, &raw.q}, {"QOut", &a.QOut, &raw.q_out},
		{"RotaryCos", &a.RotaryCos, &raw.rotary_cos}, {"RotarySin", &a.RotarySin, &raw.rotary_sin},
		{"RotaryPositions", &a.RotaryPositions, &raw.rotary_positions}, {"KDescale", &a.KDescale, &raw.k_descale},
		{"VDescale", &a.VDescale, &raw.v_descale},
	})
	if err != nil {
		return err
	}
	return ctx.check(C.go_append(ctx.handle, what, info, ctx.workspace.data, ctx.workspaceBytes(), ctx.stream, &raw, a.K.data, a.V.data,
		a.KCache.data, a.VCache.data, a.PageTable.data, a.Offsets.data, a.CuSeqlens.data, a.SeqUsed.data, a.SeqUsedK.data, a.Q.data,
		a.QOut.data, a.RotaryCos.data, a.RotarySin.data, a.RotaryPositions.data, a.KDescale.data, a.VDescale.data))
}
