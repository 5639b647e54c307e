"""Mutations of the engines."""

from functools import partial

from tests.mutations.mutation import Mutation

ENGINES_PACKAGE = "multigpu_worker.engines"
artifacts = partial(Mutation, module=f"{ENGINES_PACKAGE}.common.artifacts", checker="artifacts")
cache_file = partial(Mutation, module=f"{ENGINES_PACKAGE}.embed.cache_file", checker="vectors")
cache = partial(Mutation, module=f"{ENGINES_PACKAGE}.embed.cache", checker="vectors")
embed = partial(Mutation, module=f"{ENGINES_PACKAGE}.embed.engine", checker="content")
infer = partial(Mutation, module=f"{ENGINES_PACKAGE}.infer.engine", checker="arrays")
gate = partial(Mutation, module=f"{ENGINES_PACKAGE}.common.accuracy_gate", checker="gates")
precision = partial(Mutation, module=f"{ENGINES_PACKAGE}.common.precision", checker="gates")
paged = partial(Mutation, module=f"{ENGINES_PACKAGE}.generate.cache", checker="tokens")
sample = partial(Mutation, module=f"{ENGINES_PACKAGE}.generate.sample", checker="tokens")
memory = partial(Mutation, module=f"{ENGINES_PACKAGE}.tensorrt.device_memory", checker="plans")

BACK_ENDS = (
    artifacts(
        "the content of an artifact is not checked", 'if _hash_file(path) != manifest["files"][relative]["sha256"]:'
    ),
    artifacts(
        "an artifact of another key is used",
        'if (manifest["kind"], manifest["key"]) != (identity["kind"], identity["key"]):',
    ),
    artifacts(
        "an artifact may have foreign files",
        'set(present) ^ set(manifest["files"])',
        'set(manifest["files"]) - set(present)',
    ),
    artifacts("an artifact that others may write is used", " or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH)", ""),
    artifacts("an artifact in use is evicted", "            if _in_use(entry):\n                return False\n"),
    artifacts(
        "the oldest artifact is evicted although it is used",
        "            self._mark_used(folder)\n        except (",
        "            pass\n        except (",
    ),
    artifacts("a failed build leaves its files", "_delete(making)\n            unwritable", "unwritable"),
    artifacts("facts of an artifact are not checked", "if claimed != _hash_of(manifest):"),
    cache_file("a row's checksum is ignored", " or _checksum(row) != checksum:\n", ":\n"),
    cache_file("the cache file has no limit of rows", "if rows > min(keep, self._entries):", "if rows > keep:"),
    cache_file("the cache file has no limit of bytes", "if used_bytes > self._bytes_max:\n", "if used_bytes < 0:\n"),
    cache_file("rows from the future never expire", "- self._ttl_s, now_s + self._ttl_s)", "- self._ttl_s, 9e99)"),
    cache(
        "expired vectors are served", "not self._settings.ttl_s or abs(now_s - stored_s) < self._settings.ttl_s", "True"
    ),
    cache("vectors with NaN are cached", "for i, key in enumerate(keys) if finite[i]", "for i, key in enumerate(keys)"),
    cache("memory evicts vectors that are used", "self._entries.move_to_end(key)"),
    cache("vectors in memory have no limit of bytes", " or self._bytes > self._settings.bytes_max", ""),
    infer(
        "rows are not tested before tasks are joined",
        "                if not _has_rows(self._model.forward(inputs), rows):\n                    return False\n",
        "                self._model.forward(inputs)\n",
    ),
    gate("the gate passes every model", "        passed = figure >= threshold\n", "        passed = True\n"),
    gate("a better correlation fails", "passed = lost <= threshold", "passed = abs(lost) <= threshold"),
    gate("the best output is judged", "figure = float(np.min([", "figure = float(np.max(["),
    precision(
        "the model overrides the task's precision",
        '_first(parameters.get("precision", ""), spec.precision, worker,',
        '_first(spec.precision, parameters.get("precision", ""), worker,',
    ),
    precision("fp8 on any GPU", "capability is not None and capability >= FP8_CAPABILITY", "capability is not None"),
    Mutation(
        "a fixed dimension counts the examples",
        "if any(isinstance(each, int) for each in found) or len(found - {None}) > 1:",
        "if len(found - {None}) > 1:",
        module=f"{ENGINES_PACKAGE}.infer.backend",
        checker="gates",
    ),
    Mutation(
        "the beginning of a stop string is sent",
        "len(self._text) if ended or self.stopped else len(self._text) - self._held()",
        "len(self._text)",
        module=f"{ENGINES_PACKAGE}.generate.text",
        checker="tokens",
    ),
    Mutation(
        "more tokens than the context",
        "if room < 1 or max_tokens > room:",
        "if room < 1:",
        module=f"{ENGINES_PACKAGE}.generate.payload",
        checker="tokens",
    ),
    sample(
        "the penalty rewards unlikely tokens",
        "torch.where(scores < 0, scores * penalty, scores / penalty)",
        "scores / penalty",
    ),
    sample(
        "top_p excludes the token that crosses it",
        "torch.searchsorted(sums, bound)",
        "torch.searchsorted(sums, bound) - 1",
    ),
    paged("blocks in use are not counted", "self.used += count"),
    paged("a query sees the next token", "    seen = distance >= 0\n", "    seen = distance >= -1\n"),
    Mutation(
        "a plan with NaN passes its trial",
        "if not difference <= DIFFERENCE_MAX[precision]:",
        "if difference > DIFFERENCE_MAX[precision]:",
        module=f"{ENGINES_PACKAGE}.infer.tensorrt_backend",
        checker="plans",
    ),
    memory(
        "device memory is freed without its context",
        "        with self._memory.current():\n            self.allocation.free()\n",
        "        self.allocation.free()\n",
    ),
)
