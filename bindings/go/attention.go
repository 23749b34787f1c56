// SPDX-License-Identifier: Apache-2.0

package flashattn

// #include "shim.h"
import "C"

// Mask says which keys a query may see, before the window, bias and masks given as data.
type Mask int32

const (
	// Full: every key.
	Full Mask = C.FA_MASK_NONE
	// Causal: query i sees keys j <= i + rows of K - rows of Q.
	Causal Mask = C.FA_MASK_CAUSAL
	// CausalTopLeft: query i sees keys j <= i.
	CausalTopLeft Mask = C.FA_MASK_CAUSAL_TOP_LEFT
)

// Kinds of a row of Attention.Slices, its last number.
const (
	// SliceFull: every query of the slice sees every key of the slice.
	SliceFull int32 = C.FA_SLICE_FULL
	// SliceCausal: query i sees keys j <= i + k_end - q_end.
	SliceCausal int32 = C.FA_SLICE_CAUSAL
	// SliceInverseCausal: query i sees keys j >= i + k_begin - q_begin.
	SliceInverseCausal int32 = C.FA_SLICE_INVERSE_CAUSAL
	// SliceBothCausal: both of these limits.
	SliceBothCausal int32 = C.FA_SLICE_BOTH_CAUSAL
)

// Attention is a problem: inputs and options. flashattn.h documents shapes and meaning; zero values are defaults.
type Attention struct {
	// (batch, rows, heads, head_dim), or (total, heads, head_dim) with CuSeqlens; strides are free but for the last, which is 1.
	Q, K, V Tensor

	CuSeqlensQ, CuSeqlensK Tensor // packed sequences: (batch + 1) int32 or int64
	SeqUsedQ, SeqUsedK     Tensor // (batch) int32: rows that count
	SeqStartK              Tensor // (batch) int32: keys at the start of each sequence that are masked (left padding)
	PageTable              Tensor // (batch, max pages) int32
	MaxSeqlenQ, MaxSeqlenK int

	Mask                    Mask
	WindowLeft, WindowRight *int // how far back and ahead a query sees; nil = no limit. See Limit.

	Bias                   Tensor // added to the logits
	ElementMask            Tensor // uint8, bool or Bits, (batch or 1, heads or 1, rows of Q or 1, rows of K or 1): 0 masks the pair
	BlockMask              Tensor // uint8 or bool: 0 masks the block
	BlockSizeQ, BlockSizeK int    // of BlockMask, BlockCounts and BlockIndices
	// Visible blocks of keys for each block of queries, int32: numbers (batch or 1, heads or 1, blocks of queries), and indices with one more
	// dimension.
	BlockCounts, BlockIndices Tensor
	Slices                    Tensor // (n, 5) int32: q_begin, q_end, k_begin, k_end and a kind; a pair in no slice is masked
	KVIndices                 Tensor // (batch, rows of Q, n) int32: the rows of K that each query sees, and no others; a negative one is none
	ALiBiSlopes               Tensor // (heads) or (batch, heads) float32
	Sink                      Tensor // (heads) float32
	QDescale                  Tensor // descales of Q in Float8: (batch, heads of K) float32
	KDescale, VDescale        Tensor // descales of K and V in int8 or Float8: (batch, heads) float32, or as K and V without head_dim

	Scale         float32 // 0 = 1 / sqrt(head_dim)
	Softcap       float32
	ALiBiLogScale float32 // r > 0: ALiBi subtracts slope * log(1 + r * distance) instead of slope * distance
	DropoutP      float32
	DropoutSeed   uint64
	DropoutOffset uint64

	// CUDA only: addresses of uint64 on the device that kernels read when they run, so that a captured graph can change them; 0 = none.
	DropoutSeedAt, DropoutOffsetAt uintptr

	// Deterministic: equal inputs give equal bits. BatchInvariant: the bits of a sequence's result do not depend on the other sequences of the
	// batch. Both are always true on the CPU. SameBits: the bits of a row of the results do not depend on the other rows of the call, nor on how
	// it stores its tensors. It is for the CPU.
	Deterministic, BatchInvariant, SameBits bool

	FP32Products bool // fp32 operands are multiplied as they are, not as sums of bf16 numbers on tensor cores; always so on the CPU

	NumSplits int // CUDA, a hint: number of KV splits for short queries; 0 = automatic

	MaxLogit Tensor // (heads) float32: Forward writes the largest visible logit of each head, Backward ignores it
}

// Limit is a side of the window.
func Limit(rows int) *int { return &rows }

// Gradients has the tensors of Backward that Attention does not have. An output that is the zero Tensor is not computed.
type Gradients struct {
	DOut, DLSE               Tensor // of the results; DLSE may be absent
	DQ, DK, DV, DBias, DSink Tensor
}

// Plan describes how a call would run.
type Plan struct {
	Kernel, Reason string
	WorkspaceBytes uint64
	Flops, Bytes   float64
	NumSplits      int // 1 = the keys are not split

	SameBitsContract int // the number of the arithmetic of Attention.SameBits; 0 without it
}

func (ctx *Context) fillAttention(raw *C.fa_attention, a *Attention, out, lse *Tensor) error {
	C.fa_attention_init(raw, C.sizeof_fa_attention)
	raw.mask = C.fa_mask_kind(a.Mask)
	if a.WindowLeft != nil {
		raw.window |= C.FA_WINDOW_LEFT
		raw.window_left = C.int64_t(*a.WindowLeft)
	}
	if a.WindowRight != nil {
		raw.window |= C.FA_WINDOW_RIGHT
		raw.window_right = C.int64_t(*a.WindowRight)
	}
	raw.max_seqlen_q, raw.max_seqlen_k = C.int64_t(a.MaxSeqlenQ), C.int64_t(a.MaxSeqlenK)
	raw.block_size_q, raw.block_size_k = C.int64_t(a.BlockSizeQ), C.int64_t(a.BlockSizeK)
	raw.softmax_scale, raw.softcap, raw.dropout_p = C.float(a.Scale), C.float(a.Softcap), C.float(a.DropoutP)
	raw.alibi_log_scale = C.float(a.ALiBiLogScale)
	raw.dropout_seed, raw.dropout_offset = C.uint64_t(a.DropoutSeed), C.uint64_t(a.DropoutOffset)
	raw.num_splits = C.int32_t(a.NumSplits)
	if a.Deterministic {
		raw.flags |= C.FA_FLAG_DETERMINISTIC
	}
	if a.BatchInvariant {
		raw.flags |= C.FA_FLAG_BATCH_INVARIANT
	}
	if a.SameBits {
		raw.flags |= C.FA_FLAG_SAME_BITS
	}
	if a.FP32Products {
		raw.flags |= C.FA_FLAG_FP32_PRODUCTS
	}
	if (a.DropoutSeedAt != 0 || a.DropoutOffsetAt != 0) && !ctx.cuda {
		return &Error{Status: ErrInvalidArgument, Text: "DropoutSeedAt and DropoutOffsetAt are addresses of a device; a context of the CPU " +
			"takes DropoutSeed and DropoutOffset"}
	}
	raw.dropout_seed_ptr = (*C.uint64_t)(pointer(a.DropoutSeedAt))
	raw.dropout_offset_ptr = (*C.uint64_t)(pointer(a.DropoutOffsetAt))
	return ctx.fill([]named{
		{"Q", &a.Q, &raw.q}, {"K", &a.K, &raw.k}, {"V", &a.V, &raw.v}, {"out", out, &raw.out}, {"lse", lse, &raw.lse},
		{"CuSeqlensQ", &a.CuSeqlensQ, &raw.cu_seqlens_q}, {"CuSeqlensK", &a.CuSeqlensK, &raw.cu_seqlens_k},
		{"SeqUsedQ", &a.SeqUsedQ, &raw.seqused_q}, {"SeqUsedK", &a.SeqUsedK, &raw.seqused_k},
		{"PageTable", &a.PageTable, &raw.page_table}, {"Bias", &a.Bias, &raw.bias}, {"BlockMask", &a.BlockMask, &raw.block_mask},
		{"ALiBiSlopes", &a.ALiBiSlopes, &raw.alibi_slopes}, {"Sink", &a.Sink, &raw.sink},
		{"QDescale", &a.QDescale, &raw.q_descale}, {"KDescale", &a.KDescale, &raw.k_descale},
		{"VDescale", &a.VDescale, &raw.v_descale}, {"ElementMask", &a.ElementMask, &raw.element_mask},
		{"SeqStartK", &a.SeqStartK, &raw.seqstart_k}, {"Slices", &a.Slices, &raw.slices},
		{"BlockCounts", &a.BlockCounts, &raw.block_counts}, {"BlockIndices", &a.BlockIndices, &raw.block_indices},
		{"MaxLogit", &a.MaxLogit, &raw.max_logit}, {"KVIndices", &a.KVIndices, &raw.kv_indices},
	})
}

func (ctx *Context) forward(a *Attention, out, lse *Tensor, what C.int, info *C.fa_plan_info) error {
	if ctx.handle == nil {
		return errClosed
	}
	var raw C.fa_attention
	if err := ctx.fillAttention(&raw, a, out, lse); err != nil {
		return err
	}
	status := C.go_forward(ctx.handle, what, info, ctx.workspace.data, ctx.workspaceBytes(), ctx.stream, &raw,
		a.Q.data, a.K.data, a.V.data, out.data, lse.data, a.CuSeqlensQ.data, a.CuSeqlensK.data, a.SeqUsedQ.data, a.SeqUsedK.data,
		a.PageTable.data, a.Bias.data, a.BlockMask.data, a.ALiBiSlopes.data, a.Sink.data, a.QDescale.data, a.KDescale.data,
		a.VDescale.data, a.ElementMask.data, a.SeqStartK.data, a.Slices.data, a.BlockCounts.data, a.BlockIndices.data, a.MaxLogit.data,
		a.KVIndices.data)
	return ctx.check(status)
}

func (ctx *Context) backward(a *Attention, out, lse *Tensor, g *Gradients, what C.int, info *C.fa_plan_info) error {
	if ctx.handle == nil {
		return errClosed
	}
	var raw C.fa_attention
	var gradients C.fa_gradients
	if err := ctx.fillAttention(&raw, a, out, lse); err != nil {
		return err
	}
	C.fa_gradients_init(&gradients, C.sizeof_fa_gradients)
	err := ctx.fill([]named{
		{"DOut", &g.DOut, &gradients.dout}, {"DLSE", &g.DLSE, &gradients.dlse}, {"DQ", &g.DQ, &gradients.dq},
		{"DK", &g.DK, &gradients.dk}, {"DV", &g.DV, &gradients.dv}, {"DBias", &g.DBias, &gradients.dbias},
		{"DSink", &g.DSink, &gradients.dsink},
	})
	if err != nil {
		return err
	}
	status := C.go_backward(ctx.handle, what, info, ctx.workspace.data, ctx.workspaceBytes(), ctx.stream, &raw, &gradients,
		a.Q.data, a.K.data, a.V.data, out.data, lse.data, a.CuSeqlensQ.data, a.CuSeqlensK.data, a.SeqUsedQ.data, a.SeqUsedK.data,
		a.PageTable.data, a.Bias.data, a.BlockMask.data, a.ALiBiSlopes.data, a.Sink.data, a.QDescale.data, a.KDescale.data,
		a.VDescale.data, a.ElementMask.data, a.SeqStartK.data, a.Slices.data, a.BlockCounts.data, a.BlockIndices.data, a.MaxLogit.data,
		a.KVIndices.data,
		g.DOut.data, g.DLSE.data, g.DQ.data, g.DK.data, g.DV.data, g.DBias.data, g.DSink.data)
	return ctx.check(status)
}

// Forward computes out and, unless it is the zero Tensor, lse: float32, (batch, heads, rows) or (heads, total).
func (ctx *Context) Forward(a Attention, out, lse Tensor) error {
	return ctx.forward(&a, &out, &lse, C.GO_RUN, nil)
}

// Backward computes the outputs that are present in g, from the out and lse of Forward.
func (ctx *Context) Backward(a Attention, out, lse Tensor, g Gradients) error {
	return ctx.backward(&a, &out, &lse, &g, C.GO_RUN, nil)
}

// PrepareForward loads the kernels of Forward for this problem, so that the next call, or its capture in a CUDA graph, loads none. On the CPU it
// only checks the problem.
func (ctx *Context) PrepareForward(a Attention, out, lse Tensor) error {
	return ctx.forward(&a, &out, &lse, C.GO_PREPARE, nil)
}

// PrepareBackward loads the kernels of Backward. See PrepareForward.
func (ctx *Context) PrepareBackward(a Attention, out, lse Tensor, g Gradients) error {
	return ctx.backward(&a, &out, &lse, &g, C.GO_PREPARE, nil)
}

func plan(ask func(info *C.fa_plan_info) error) (Plan, error) {
	var info C.fa_plan_info
	C.fa_plan_info_init(&info, C.sizeof_fa_plan_info)
	if err := ask(&info); err != nil {
		return Plan{}, err
	}
	return Plan{
		Kernel: C.GoString(&info.kernel[0]), Reason: C.GoString(&info.reason[0]), WorkspaceBytes: uint64(info.workspace_bytes),
		Flops: float64(info.flops), Bytes: float64(info.bytes), NumSplits: int(info.num_splits),
		SameBitsContract: int(info.same_bits_contract),
	}, nil
}

// QueryForward reports how Forward would run, or why it would not. It reads no tensor data.
func (ctx *Context) QueryForward(a Attention, out, lse Tensor) (Plan, error) {
	return plan(func(info *C.fa_plan_info) error { return ctx.forward(&a, &out, &lse, C.GO_QUERY, info) })
}

// QueryBackward reports how Backward would run, or why it would not. It reads no tensor data.
func (ctx *Context) QueryBackward(a Attention, out, lse Tensor, g Gradients) (Plan, error) {
	return plan(func(info *C.fa_plan_info) error { return ctx.backward(&a, &out, &lse, &g, C.GO_QUERY, info) })
}
