# SPDX-License-Identifier: Apache-2.0
"""What the tests in engines share: small models with random parameters, prompts, and what eager attention of transformers makes of them."""

import pathlib
import tempfile
import unittest
from unittest import mock

from tests.torch_cases import SEED

import torch
import transformers
from transformers.models.llama import modeling_llama

VOCABULARY = 199
#: Parameters are large, so that attention is far from uniform.
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WINDOW = 21


class EngineCase(unittest.TestCase):
    #: By the name of the class: its configuration.
    MODELS = {}
    #: Of log probabilities. Transformers itself is 2e-5 from float64.
    TOLERANCE = 1e-4
    #: Prompts, and the tokens that each is continued by.
    REQUESTS, NEW = 6, 8
    #: Requests that run together, and tokens that a step may compute.
    RUNNING, BUDGET = 3, 32
    #: Log probabilities that are asked for with each token.
    LIKELY = 5

    def setUp(self):
        self.generator = torch.Generator().manual_seed(SEED)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.model = self.folder / "model"

    def save(self, name, dtype=torch.float32):
        """A model of transformers, which the engine finds in a folder."""
        torch.manual_seed(SEED)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**self.MODELS[name])).to(dtype).eval()
        model.set_attn_implementation("eager")
        model.save_pretrained(self.model)
        return model

    def tokens(self, n):
        return torch.randint(3, VOCABULARY, (n,), generator=self.generator).tolist()

    def prompts(self, shared=0):
        """Prompts that begin alike, of random lengths. The first and every third are longer than a step may compute."""
        beginning = self.tokens(shared)
        lengths = torch.randint(1, 40, (self.REQUESTS,), generator=self.generator).tolist()
        return [beginning + self.tokens(n + 50 * (r % 3 == 0)) for r, n in enumerate(lengths)]

    def needed(self, prompts):
        """Tokens that have to be computed; the last one of a request does not."""
        return sum(map(len, prompts)) + len(prompts) * (self.NEW - 1)

    def expected(self, model, prompt, tokens):
        """Log probabilities (tokens, vocabulary) of what follows the prompt and each of the tokens but the last."""
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits
        return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)

    def assert_as_transformers(self, model, prompts, answers, tolerance=TOLERANCE):
        """`answers`, by prompt: its tokens, and with each of them a dictionary of log probabilities. After the tokens before it, each token is the one
        that eager attention finds most likely, and log probabilities are the same.
        """
        self.assertEqual(len(answers), len(prompts))
        for prompt, (tokens, likely) in zip(prompts, answers):
            self.assertEqual((len(tokens), len(likely)), (self.NEW, self.NEW))
            for row, token, given in zip(self.expected(model, prompt, tokens), tokens, likely):
                self.assertGreaterEqual(len(given), self.LIKELY)
                for other, logprob in given.items():
                    self.assertAlmostEqual(logprob, float(row[other]), delta=tolerance)
                self.assertAlmostEqual(float(row[token]), float(row.max()), delta=2 * tolerance)

    def assert_as_transformers_with_fp8_cache(self, model, prompts, outputs):
        """Next to Llama of transformers with keys and values in e4m3, whose bits show. A number next to the middle between two of these may become either."""
        eager = modeling_llama.eager_attention_forward

        def rounded(module, query, key, value, *rest, **named):
            key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
            return eager(module, query, key, value, *rest, **named)

        tolerance = 0.02
        with self.assertRaises(AssertionError):
            self.assert_as_transformers(model, prompts, outputs, tolerance)
        with mock.patch.object(modeling_llama, "eager_attention_forward", rounded):
            self.assert_as_transformers(model, prompts, outputs, tolerance)
