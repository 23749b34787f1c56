#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The guides and the sources use the words of CUTLASS, PTX and the FlashAttention papers: one word, one meaning. This finds the private
words that earlier versions used instead, each with the word to write.

An allowance in docs/words_allowed.txt is a line `PATH | WORD | REASON`: a glob of files, the name of a rule below or `*`, and why the word is right
there. A fourth field `PATH | WORD | TEXT | REASON` narrows it to lines that contain TEXT. An allowance that nothing needs is an error.

usage: check_words.py ROOT [PATH ...] [--count]     paths are files, folders or globs below ROOT; default: DEFAULT below
                                                    --count prints numbers by rule and folder, and never fails
"""
import re
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

DEFAULT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "include", "src/api", "src/cmake", "src/core", "src/cpu", "src/cuda", "src/dist", "bindings", "tests")
SUFFIXES = {".md", ".py", ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".go", ".in", ".inc", ".cmake", ".jl", ".rs", ".txt", ".1"}
SKIPPED = {"target", "build", "__pycache__", "pictures", "data", ".git"}

# name: (pattern, what to write). Patterns name the private meaning as closely as a line of text allows. An underscore and a capital letter inside
# a word are boundaries, so that identifiers are found too.
RULES = {
    "copy engine": (r"copy[ _]engines?", "TMA"),
    "slab": (r"slabs?", "128-byte swizzle atom"),
    "block of threads": (r"blocks? of threads", "CTA"),
    "multiprocessor": (r"(?<!streaming )multiprocessor|(?:the|of|than|are|other|all|two|more|has|many|on|with|for|common|from|own|[0-9]+) multiprocessors", "SM"),
    "those who": (r"those (?:who|that) (?:fetch|multiply|widen|compute)|warps? that (?:fetch(?:es)?|plans?)|fetching warps?|groups? that multipl(?:y|ies)",
                  "producer warp, consumer warpgroups, scheduler warp"),
    "ring": (r"rings?(?![ _]buffer)", "pipeline (of stages)"),
    "place": (r"(?:one|two|three|six) places? for (?:Q|K|V|dO)|places? in (?:the|a) rings?|places? of (?:operands|tiles|Q|K|V)", "pipeline stage"),
    "chunk": (r"(?<!prefill )(?!(?<=\.)chunks\()chunks?(?:_\w+)?", "KV tile (or query tile)"),
    "walk": (r"(?<!random )walk(?:s|ed|ing)?", "main loop; iterate over, traverse"),
    "turn": (r"(?:take|takes|taking|by|wait(?:s|ed)? for (?:the|its)|pass(?:es|ed)? (?:the|on)) turns?|turns? (?:is|are) (?:asked|passed)",
             "iteration; ping-pong; semaphore of dq; interleaved runs"),
    "weigh": (r"weigh(?:s|ed|ing)?(?= (?:values|v|keys|the values))|weights?", "P (the exponentiated scores)"),
    "lag": (r"late maxim(?:um|a)|maxim(?:um|a) (?:may )?lags?|lag of the maxim(?:um|a)|maxim(?:um|a) as it is", "lazy rescaling (threshold)"),
    "factor": (r"factors? (?:of|for) (?:rows?|keys|values|queries|k|v|q)|(?:row|key|value|k|v|q)[_ ]factors?|with factors|factor a (?:row|head)"
               r"|one factor(?= (?:a|per|for))", "descale"),
    "bytes": (r"(?:over|beside) bytes(?= ?[,.;:)]| (?:and|with|by|at|have|the|come|lie|of (?:keys|values|e4m3)))|caches? of bytes|bytes? caches?|bytes_(?:table|instance)", "8-bit KV"),
    "shares": (r"(?:even|equal|longer|shorter|a|the|two|its|each|whose) shares?(?= (?:of work|of a|ends?|begins?|may|has|is|each|are|that|which|cross))|shares of (?:work|items|heads)|even shares?",
               "stream-K partition"),
    "items": (r"work items?|items? of (?:work|the line)|line of work", "work tile"),
    "pieces": (r"pieces? of (?:work|keys)|pieces of at least|equal pieces", "KV split, or 16-byte vector"),
    "parts": (r"parts? (?:is|are) (?:summed|added|merged|stored)|(?:add|adds|sum|sums|summing) (?:up )?(?:the )?parts|parts? in memory|last part"
              r"|few parts|(?<!too )many parts", "split-KV partial"),
    "sums": (r"launch (?:of its own )?that sums|second launch|blocks? of the sum", "combine kernel"),
    "abreast": (r"abreast(?:_\w+)?|(?:heads|neighbours)(?: (?:are|run|go))? side by side", "co-scheduled KV heads"),
    "rows by keys": (r"(?:rows|keys)[ _]by[ _](?:keys|rows)|keys as (?:the )?rows of (?:the )?products", "S = Q K^T or S^T = K Q^T orientation"),
    "mend": (r"mend(?:s|ed|ing)?|repairs? (?:nan|the tile)|slow road|with care|needs? care|exactly(?= \()", "NaN-safe path"),
    "landing": (r"landings?|lands? in", "DSMEM buffer"),
    "blind": (r"blind(?:ly)?", "empty tile, skip"),
    "told": (r"(?:is|are|was|were|be) (?:told|heard|agreed|doubted)(?! (?:apart|from))", "name the barrier's data: dS_ready, K_empty"),
    "chained": (r"chained|chaining", "programmatic dependent launch (PDL)"),
    "stays": (r"(?:blocks?|pairs?|ctas?|kernels?|clusters?) (?:that |do not )?stays?(?! (?:out|the|with|within|on|a|as|below|for|whole|ready|under))", "persistent"),
    "sections": (r"sections? of (?:heads|sequences)|heads? (?:are|is|in) (?:a |one )?sections?|last section|heads_per_section", "L2-aware head order (swizzle)"),
    "asks for": (r"asked (?:of|for ahead)|asked for (?:early|first|before|at once)", "loaded, prefetched"),
    "one a": (r"(?:(?:one|two|three|four|(?<![.\d])[0-9]+)(?: (?!before|after|is|are|has|of|in|to|by|and|for|as|with|from|on|at|that|per)\w+)?"
              r"|a (?:warp|lane|thread|block|line|context|cluster|factor|part|count)) an? "
              r"(?:sequence|head|row|warp|lane|thread|block|tile|cta|sm|multiprocessor|part|item|share|kernel|group|warpgroup|chip|device)(?![\w'-])",
              "one per ..."),
    "products": (r"products_(?:begin|commit|wait)|(?:give|take)_registers?|hold\(", "wgmma fence, commit, wait; setmaxnreg; fence operand"),
    "stamps": (r"stamps?(?: of a clock)?", "timestamps"),
}
# Words that are plain English elsewhere and private in the kernels. Each pattern leaves out the plain and the technical meanings: ranges of keys
# (RangeOf, KeyRange), threads that share something, the factor of rescaling, merge's parts, rows in their place, x that turns into y, registers
# in which something stays.
CUDA = "src/cuda/"
CUDA_RULES = {
    "cuda: partition": (r"items?|pieces?|(?:first|num)_ranges?|ranges?_(?:of|begin|end)|(?<=\.)ranges|(?<!tile )ranges (?:in|before|after|that|are)"
                        r"|(?<!\d)(?:a|the|its|each|this|even|own|most|longer|next|of|add|set|put) shares?(?! (?:a|an|it|the))|\w+_shares?(?:_\w+)?|shares?_\w+"
                        r"|shares? (?:is|are|has|ends|begins)", "stream-K partition, work tile, work unit, KV split"),
    "cuda: partial": (r"(?:add|sum|take|await|store|all|most|over|l2)_parts|parts_(?:of|together)|turn_of_parts|(?<=plan\.|line\.)parts|(?<=cut\.)parts"
                      r"|items in parts|parts (?:of (?:items|the ranges|each)|before|in the workspace)", "split-KV partials"),
    "cuda: stage": (r"(?<!\bq\.)(?<!\bk\.)(?<!sequence\.)(?<!seq_)(?<!issue )(?<!sequence's )(?<!\)\.)slots?|(?:await|has|next|p)_place|place_in(?:_\w+)?|place_(?!\w)|k places"
                    r"|places (?:in (?:shared|the ring)|of (?:K|V|Q))|(?:free|empty|full|next) places?", "pipeline stage"),
    "cuda: turn": (r"\w+_turns?(?:_\w+)?|turns?_\w+|(?<!in )turns(?! out)(?![^.;]* into)(?! [a-zA-Z]+ (?:to|of))|turn(?=[ ;,.)\]=])(?<!in turn)(?! into)"
                   r"|k turns?", "iteration; ping-pong; semaphore of dq"),
    "cuda: section": (r"(?<!critical )sections?", "L2-aware head order (swizzle)"),
    "cuda: factor": (r"(?:only|shared|top|leave)_factors?|factors?_(?:of|if)|(?<!descale\.)(?<!rescaling )(?<!rescale )factors(?! (?:of|for|by which) out)"
                     r"|factor (?:a|per) (?:row|head|key)|factor of (?:all |the |a )?(?:keys?|values?|quer(?:y|ies))", "descale"),
    "cuda: epilogue": (r"(?<!::)clos(?:e(?! to)|es|ed|ing)", "epilogue"),
    "cuda: NaN-safe": (r"\w+_exactly(?:_\w+)?|exactly_\w+|(?<!take )(?<!takes )care(?! of)", "NaN-safe path"),
    "cuda: barrier": (r"heard|doubts?|(?<!is )(?<!are )met|agreed|(?:is|are|was|were|be) (?:told(?! from| apart)|asked(?! for))|(?<!is )(?<!are )(?<!not )asked (?:for|of|about|again)|told of",
                      "name the barrier's data: dS_ready, K_empty"),
    "cuda: persistent": (r"staying|init_stay|(?<=\.)stays|k stays|(?:that|which|who) stay(?! (?:in|below|at))|stay (?:as long|for few)", "persistent"),
}
RULES.update(CUDA_RULES)
COMPILED = {name: re.compile(rf"(?<![A-Za-z-])(?:{pattern})(?![A-Za-z])", re.I) for name, (pattern, _) in RULES.items()}


class Allowance:
    def __init__(self, line):
        fields = [field.strip() for field in line.split(" | ")]
        if len(fields) not in (3, 4) or not fields[-1] or fields[1] not in (*RULES, "*"):
            raise ValueError(f"not an allowance: {line}")
        self.line, self.files, self.rule, self.text = line, fields[0], fields[1], fields[2] if len(fields) == 4 else ""
        self.used = False

    def covers(self, path, rule, text):
        fits = fnmatch(path, self.files) and self.rule in ("*", rule) and self.text in text
        self.used |= fits
        return fits


def files_of(root, paths):
    for path in (path for each in paths for path in sorted(root.glob(each)) or [root / each]):
        if not path.exists():
            raise FileNotFoundError(path)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix in SUFFIXES and file.name != "words_allowed.txt" and not SKIPPED & set(file.relative_to(root).parts):
                yield file


def found(root, paths, allowances):
    """(file, line number, rule, match) of every private word that nothing allows."""
    for file in files_of(root, paths):
        name = str(file.relative_to(root))
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)  # kChunkRows
            for rule, pattern in COMPILED.items():
                if rule in CUDA_RULES and not name.startswith(CUDA):
                    continue
                for match in pattern.finditer(words):
                    if not any([each.covers(name, rule, line) for each in allowances]):
                        yield name, number, rule, match.group(0)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--count"]
    root, paths = Path(arguments[0]).resolve(), arguments[1:] or DEFAULT
    allowances = [Allowance(line) for line in (root / "docs/words_allowed.txt").read_text().splitlines() if line.strip() and not line.startswith("#")]
    words = list(found(root, paths, allowances))
    if "--count" in sys.argv:
        counts = Counter((str(Path(name).parent), rule) for name, _, rule, _ in words)
        rules = Counter(rule for _, _, rule, _ in words)
        for rule, number in rules.most_common():
            folders = ", ".join(f"{folder} {n}" for (folder, each), n in counts.most_common() if each == rule)
            print(f"{number:5d}  {rule:18s} write: {RULES[rule][1]}\n       {folders}")
        print(f"{len(words)} private words in {len({name for name, *_ in words})} files")
        return 0
    for name, number, rule, text in words:
        print(f"{name}:{number}: \"{text}\": write {RULES[rule][1]}")
    problems = len(words)
    if not arguments[1:]:  # an allowance may be for files that were not asked for
        unused = [each for each in allowances if not each.used]
        problems += len(unused)
        for each in unused:
            print(f"docs/words_allowed.txt: nothing needs: {each.line}")
    print(f"{problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
