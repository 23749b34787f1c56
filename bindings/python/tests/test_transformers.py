# SPDX-License-Identifier: Apache-2.0
"""flashattn.transformers with models of the package itself, small and with random parameters: results and gradients next to eager attention in
float64, generation with padding and with every kind of cache.
"""

import copy
import functools
import unittest

from tests.torch_cases import TorchCase, reference

import torch

try:
    import transformers
except ImportError as error:
    raise unittest.SkipTest("transformers is not installed") from error
if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 17):
    raise unittest.SkipTest(f"transformers 5.17 is not installed, but {transformers.__version__}")

from transformers import masking_utils

import flashattn.transformers
from flashattn.transformers import Mask, make_mask

SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
)
GROUPED = dict(SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
#: By the name of the class: its configuration.
DECODERS = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": dict(GROUPED, sliding_window=5),
    "Qwen2ForCausalLM": GROUPED,
    "Gemma2ForCausalLM": dict(GROUPED, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "Gemma3ForCausalLM": dict(GROUPED, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "GptOssForCausalLM": dict(GROUPED, sliding_window=5, num_local_experts=2, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]),
    "GPT2LMHeadModel": dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "PhiForCausalLM": dict(SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "DeepseekV3ForCausalLM": dict(
        SMALL, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip
#: Its generation with a static cache fails in transformers 5.17, whatever the attention.
ONLY_FORWARD = {
    "Llama4ForCausalLM": dict(GROUPED, attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=96),
}


def by_definition(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **_,
):
    """An attention function for transformers; its mask is the one of bool that transformers builds for PyTorch's operator."""
    assert dropout == 0
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None and rows > 1 and (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        attention_mask = torch.ones(1, 1, rows, keys, dtype=torch.bool).tril()
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options = dict(scale=scaling, bias=position_bias, sink=s_aux, softcap=softcap)
    return reference(query, key, value, attention_mask, **options)[0].to(query.dtype), None


class FamiliesTest(TorchCase):
    @classmethod
    def setUpClass(cls):
        cls.name = flashattn.transformers.register()
        transformers.AttentionInterface.register("by_definition", by_definition)
        always = functools.partial(masking_utils.sdpa_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

        def mask(*arguments, allow_is_causal_skip=None, allow_is_bidirectional_skip=None, **options):
            return always(*arguments, **options)

        transformers.AttentionMaskInterface.register("by_definition", mask)
        transformers.logging.set_verbosity_error()

    def models(self, name, config):
        """The model in float32 with this package and with eager attention, and in float64."""
        config = getattr(transformers, name).config_class(**config)
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.generator)))
        first = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
        for parameter in first.parameters():  # sinks and biases, too
            if float(parameter.detach().abs().max()) == 0:
                torch.nn.init.normal_(parameter)
        result = []
        for attention, dtype in ((self.name, torch.float32), ("eager", torch.float32), ("by_definition", torch.float64)):
            model = (
                getattr(transformers, name)._from_config(copy.deepcopy(config), attn_implementation=attention).to(dtype).eval()
            )
            model.load_state_dict(first.state_dict())
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")
            result.append(model)
        # A configuration says which attention runs, so every model has its own.
        self.assertEqual([model.config._attn_implementation for model in result], [self.name, "eager", "by_definition"])
        return result

    def check(self, models, attend, compare=lambda x: x):
        """`attend(model)` returns a tensor; it and the gradients of the parameters are as near to float64 as eager attention's, or twice that."""
        ours, eager, exact = ([], [], [])
        for model, results in zip(models, (ours, eager, exact)):
            out = compare(attend(model))
            results.append(out.detach().double())
            generator = torch.Generator().manual_seed(1)
            dout = torch.randn(out.shape, generator=generator)
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            gradients = torch.autograd.grad(out, [p for _, p in named], dout.to(out.dtype), allow_unused=True)
            results += [None if g is None else g.double() for g in gradients]
        # A gradient may be 0 but for rounding (of the bias of keys), so the others say what is small.
        scale = max(float(x.abs().max()) for x in exact if x is not None)
        for mine, its, exactly in zip(ours, eager, exact):
            self.assertEqual(mine is None, exactly is None)
            if mine is not None:
                error, allowed = (float((x - exactly).abs().max()) for x in (mine, its))
                self.assertTrue(bool(mine.isfinite().all()))
                self.assertLessEqual(error, 2 * allowed + 1e-6 * scale)

    def tokens(self, batch, length):
        return torch.randint(3, 97, (batch, length), generator=self.generator)

    def padding(self, side, batch, length):
        """(batch, length) of 0 and 1: the first sequence is whole."""
        lengths = torch.tensor([length] + [length // 2 + n for n in range(batch - 1)]).view(-1, 1)
        position = torch.arange(length)
        return (position < lengths if side == "right" else position >= length - lengths).long()

    def test_decoders(self):
        for name, config in {**DECODERS, **ONLY_FORWARD}.items():
            models = self.models(name, config)
            ids = self.tokens(3, 12)
            with self.subTest(name=name):
                self.check(models, lambda model: model(ids).logits)
            for side in ("left", "right"):
                mask = self.padding(side, 3, 12)
                with self.subTest(name=name, padding=side):
                    self.check(models, lambda model: model(ids, attention_mask=mask).logits, lambda x: x[mask.bool()])
            with self.subTest(name=name, padding="holes"):
                mask = self.padding("left", 3, 12)
                mask[0, 4:6] = 0
                self.check(models, lambda model: model(ids, attention_mask=mask).logits, lambda x: x[mask.bool()])

    def test_packed_positions(self):
        """Several sequences in one row, as position_ids tell."""
        for name in ("LlamaForCausalLM", "MistralForCausalLM"):
            models = self.models(name, DECODERS[name])
            ids, positions = self.tokens(1, 12), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
            self.check(models, lambda model: model(ids, position_ids=positions, use_cache=False).logits)

    def test_generation(self):
        """Greedy tokens and logits of each step, with left padding, for all caches; the static one also compiled."""
        for name, config in DECODERS.items():
            ours, _, exact = self.models(name, config)
            ids, mask = self.tokens(2, 7), self.padding("left", 2, 7)
            for cache in ("dynamic", "static"):
                for given in (None, mask):
                    with self.subTest(name=name, cache=cache, padded=given is not None):
                        options = dict(
                            attention_mask=given, max_new_tokens=9, min_new_tokens=9, do_sample=False, cache_implementation=cache, pad_token_id=0,
                            return_dict_in_generate=True, output_logits=True, disable_compile=True,
                        )  # fmt: skip
                        mine, its = ours.generate(ids, **options), exact.generate(ids, **options)
                        torch.testing.assert_close(
                            torch.stack(mine.logits).double(), torch.stack(its.logits).double(), rtol=1e-3, atol=1e-3
                        )
                        self.assertTrue(torch.equal(mine.sequences, its.sequences))

    def test_compiled_generation(self):
        for name in ("LlamaForCausalLM", "Gemma2ForCausalLM"):
            ours, _, _ = self.models(name, DECODERS[name])
            ids, mask = self.tokens(2, 7), self.padding("left", 2, 7)
            options = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
            expected = ours.generate(ids, **options)
            graphs = []

            def backend(module, inputs):
                graphs.append(module)
                return module

            ours.forward = torch.compile(ours.forward, backend=backend, fullgraph=True)
            got = ours.generate(ids, cache_implementation="static", disable_compile=True, **options)
            self.assertTrue(torch.equal(got, expected))
            self.assertLessEqual(len(graphs), 3)  # the prompt, the first token, all others

    def test_encoders(self):
        mask = self.padding("right", 3, 11)
        ids = self.tokens(3, 11)
        models = self.models("BertModel", dict(SMALL, attention_probs_dropout_prob=0.0))
        self.check(models, lambda model: model(ids).last_hidden_state)
        for side in ("left", "right"):
            mask = self.padding(side, 3, 11)
            self.check(models, lambda model: model(ids, attention_mask=mask).last_hidden_state, lambda x: x[mask.bool()])
        models = self.models(
            "ModernBertModel",
            dict(
                SMALL,
                local_attention=6,
                global_attn_every_n_layers=2,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            ),
        )
        for side in ("left", "right"):
            mask = self.padding(side, 3, 11)
            self.check(models, lambda model: model(ids, attention_mask=mask).last_hidden_state, lambda x: x[mask.bool()])
        models = self.models(
            "ViTModel",
            dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4),
        )
        pixels = torch.randn(2, 3, 16, 16, generator=self.generator)
        self.check(models, lambda model: model(pixels.to(model.dtype)).last_hidden_state)

    def test_encoder_and_decoder(self):
        models = self.models(
            "T5ForConditionalGeneration",
            dict(
                vocab_size=97,
                d_model=64,
                d_kv=16,
                d_ff=96,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            ),
        )
        ids, answers = self.tokens(3, 11), self.tokens(3, 6)
        for side in ("left", "right"):
            mask = self.padding(side, 3, 11)
            self.check(models, lambda model: model(ids, attention_mask=mask, decoder_input_ids=answers).logits)
        options = dict(attention_mask=mask, max_new_tokens=7, min_new_tokens=7, do_sample=False)
        self.assertTrue(torch.equal(models[0].generate(ids, **options), models[2].generate(ids, **options)))
        models = self.models(
            "WhisperForConditionalGeneration",
            dict(
                vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
                decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1,
            ),
        )  # fmt: skip
        sound = torch.randn(3, 8, 20, generator=self.generator)
        self.check(models, lambda model: model(sound.to(model.dtype), decoder_input_ids=answers).logits)

    def test_training(self):
        """Dropout draws from PyTorch's generator; checkpoints draw again what they drew."""
        model, _, _ = self.models("LlamaForCausalLM", dict(GROUPED, attention_dropout=0.4))
        ids, mask = self.tokens(2, 12), self.padding("left", 2, 12)
        gradients = []
        for checkpoints in (False, True):
            if checkpoints:
                model.gradient_checkpointing_enable()
            model.train()
            torch.manual_seed(5)
            model.zero_grad()
            model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for plain, again in zip(*gradients):
            torch.testing.assert_close(plain, again)
        torch.manual_seed(6)
        other = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        torch.manual_seed(5)
        self.assertFalse(torch.equal(model(ids, attention_mask=mask, labels=ids, use_cache=False).loss, other))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "name is 'flash_c'; transformers takes names with 'flash'"):
            flashattn.transformers.register("flash_c")
        self.assertEqual(flashattn.transformers.register(), flashattn.transformers.register())
        for name, config in (
            ("BloomForCausalLM", dict(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)),
            ("MptForCausalLM", dict(vocab_size=97, d_model=64, n_layers=2, n_heads=4, max_seq_len=64)),
        ):
            model = getattr(transformers, name)
            model = model._from_config(model.config_class(**config), attn_implementation=self.name)
            with self.assertRaisesRegex(ValueError, "has an attention of its own"):
                model(self.tokens(2, 7), attention_mask=self.padding("left", 2, 7))
        x = torch.randn(1, 2, 4, 16)
        with self.assertRaisesRegex(ValueError, "output_attentions is True"):
            flashattn.transformers.attend(None, x, x, x, None, output_attentions=True)
        with self.assertRaisesRegex(ValueError, "attention_mask has 2 dimensions"):
            flashattn.transformers.attend(None, x, x, x, torch.ones(1, 4))
        mask = make_mask(1, 4, 5, 1)
        with self.assertRaisesRegex(ValueError, "the mask is for 4 queries and 5 keys; query has 4 and key 4"):
            flashattn.transformers.attend(None, x, x, x, mask)


class AttendTest(TorchCase):
    def test_without_a_mask(self):
        """As PyTorch's operator: causal from the first key on where the module or the call says so, and never for a single query."""

        class Module:
            is_causal = False

        q, k, v = self.normal(2, 4, 5, 16), self.normal(2, 2, 7, 16), self.normal(2, 2, 7, 12)
        causal = torch.ones(5, 7, dtype=torch.bool).tril()
        for module, is_causal, rows, visible in (
            (None, None, 5, causal),
            (Module, None, 5, None),
            (Module, True, 5, causal),
            (None, False, 5, None),
            (None, True, 1, None),
        ):
            with self.subTest(module=module, is_causal=is_causal, rows=rows):
                ours, _ = flashattn.transformers.attend(module, q[:, :, :rows], k, v, None, is_causal=is_causal)
                expected = reference(*(x.transpose(1, 2) for x in (q[:, :, :rows], k, v)), visible)[0]
                self.assert_same(ours, expected, [q, k, v])

    def test_masks_of_numbers(self):
        """A user's own mask is added to the logits, beside a bias of positions and sinks; one sequence of queries serves a batch."""
        q, k, v = self.normal(1, 4, 5, 16), self.normal(2, 4, 7, 16), self.normal(2, 4, 7, 12)
        mask, bias, sink = self.normal(2, 1, 5, 7), self.normal(1, 4, 5, 7), self.normal(4)
        ours, _ = flashattn.transformers.attend(None, q, k, v, mask, s_aux=sink, position_bias=bias, scaling=0.3)
        given = [x.transpose(1, 2) for x in (q.expand(2, -1, -1, -1), k, v)]
        self.assert_same(ours, reference(*given, bias=mask + bias, sink=sink, scale=0.3)[0], [q, k, v, mask, bias, sink])


class MaskTest(TorchCase):
    """The masks themselves against those that transformers builds."""

    def functions(self):
        return {
            "causal": masking_utils.causal_mask_function,
            "sliding": masking_utils.sliding_window_causal_mask_function(3),
            "both": masking_utils.bidirectional_mask_function,
            "sliding both": masking_utils.sliding_window_bidirectional_mask_function(2),
            "reversed": masking_utils.or_masks(lambda b, h, q, k: k >= q),
            "chunked": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 1, 2])),
        }

    def paddings(self, keys):
        yield None
        positions = torch.arange(keys)
        first = torch.tensor([0, 2, keys - 1]).view(3, 1)
        yield positions >= first
        yield positions < keys - first
        yield torch.ones(3, keys, dtype=torch.bool)
        yield self.coin(3, keys)
        yield torch.zeros(3, keys, dtype=torch.bool)
        yield (positions >= first)[:, : keys // 2 + 1]  # shorter: tokens that are still to come

    def test_against_transformers(self):
        kinds = {}
        for rows, keys, q_offset, kv_offset in (
            (7, 7, 0, 0),
            (1, 9, 8, 0),
            (3, 9, 6, 0),
            (3, 9, 2, 0),
            (1, 9, 4, 0),
            (4, 9, 0, 0),
            (2, 5, 7, 4),
            (2, 5, 6, 4),
            (9, 4, 0, 0),
        ):
            for is_tensor in (False, True):
                for name, function in self.functions().items():
                    for number, padding in enumerate(self.paddings(keys + kv_offset)):
                        offset = torch.tensor(q_offset) if is_tensor else q_offset
                        given = (3, rows, keys, offset, kv_offset, function, padding)
                        case = dict(rows=rows, keys=keys, q_offset=offset, kv_offset=kv_offset, function=name, padding=number)
                        if is_tensor and q_offset + rows - kv_offset > keys:
                            continue  # no cache says so
                        with self.subTest(**case):
                            expected = masking_utils.sdpa_mask(*given, allow_is_causal_skip=False).expand(3, 1, rows, keys)
                            mask = make_mask(*given)
                            if isinstance(mask, Mask):
                                # Padded queries on the right see what they like.
                                kinds.setdefault(name, set()).add(
                                    (
                                        mask.causal,
                                        mask.element_mask is not None,
                                        mask.seqstart_k is not None,
                                        mask.seqused_k is not None,
                                    )
                                )
                                self.assertEqual(mask.shape, expected.shape)
                                self.assertTrue(torch.equal(mask.tensor(), expected))
                                self.assertTrue(torch.equal(torch.where(mask, 1, 0), expected.int()))
                                self.assertTrue(torch.equal(mask[:, :, :1], expected[:, :, :1]))
                                self.assertTrue(torch.equal(mask.logical_not(), ~expected))
                                q, k = self.normal(3, 2, rows, 16, grad=False), self.normal(3, 2, keys, 16, grad=False)
                                outs = [flashattn.transformers.attend(None, q, k, k, m)[0] for m in (mask, expected)]
                                torch.testing.assert_close(*outs)
                            else:
                                self.assertTrue(torch.equal(mask.expand_as(expected), expected))
        self.assertEqual(set(kinds), {"causal", "sliding", "both", "sliding both"})
        # Padding on one side, windows and caches need no mask of pairs.
        self.assertIn(
            ("bottom_right", False, True, True),
            {(("bottom_right" if c is True else c), e, s, u) for c, e, s, u in kinds["sliding"]},
        )
        self.assertIn(("top_left", False, False, True), kinds["causal"])

    def test_static_caches_count_in_place(self):
        count = torch.tensor(4)
        mask = make_mask(2, 2, 9, count)
        count.add_(2)
        self.assertEqual(mask.seqused_k.tolist(), [6, 6])

    def test_traced(self):
        """Nothing is read where that is impossible."""
        padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
        traced = torch.compile(lambda p: make_mask(2, 4, 4, attention_mask=p).tensor(), fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(traced(padding), masking_utils.sdpa_mask(2, 4, 4, attention_mask=padding)))

    def test_moved(self):
        mask = make_mask(2, 2, 9, torch.tensor(4), attention_mask=torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 1]] * 2).bool())
        moved = mask.to("meta")
        self.assertEqual((moved.device.type, moved.seqused_k.device.type, moved.element_mask.device.type), ("meta",) * 3)
        self.assertIs(mask.to("cpu"), mask)


if __name__ == "__main__":
    unittest.main()
