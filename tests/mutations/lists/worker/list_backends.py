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
        name="the content of an artifact is not checked",
        old='            if _hash_file(path) != manifest["files"][relative]["sha256"]:\n',
        new="            if False:\n",
    ),
    artifacts(
        name="an artifact of another key is used",
        old='        if (manifest["kind"], manifest["key"]) != (identity["kind"], identity["key"]):\n',
        new="        if False:\n",
    ),
    artifacts(
        name="an artifact may have foreign files",
        old='set(present) ^ set(manifest["files"])',
        new='set(manifest["files"]) - set(present)',
    ),
    artifacts(
        name="an artifact that others may write is used",
        old=" or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        new="",
    ),
    artifacts(
        name="an artifact in use is evicted",
        old="            if _in_use(entry):\n                return False\n",
        new="",
    ),
    artifacts(
        name="the oldest artifact is evicted although it is used",
        old="            self._mark_used(folder)\n        except (",
        new="            pass\n        except (",
    ),
    artifacts(
        name="a failed build leaves its files",
        old="            _delete(making)\n            unwritable",
        new="            unwritable",
    ),
    artifacts(
        name="facts of an artifact are not checked",
        old="        if claimed != _hash_of(manifest):\n",
        new="        if False:\n",
    ),
    cache_file(name="a row's checksum is ignored", old=" or _checksum(row) != checksum:\n", new=":\n"),
    cache_file(
        name="the cache file has no limit of rows", old="if rows > min(keep, self._entries):", new="if rows > keep:"
    ),
    cache_file(
        name="the cache file has no limit of bytes",
        old="if used_bytes > self._bytes_max:\n",
        new="if used_bytes < 0:\n",
    ),
    cache_file(
        name="rows from the future never expire",
        old="now_s - self._ttl_s, now_s + self._ttl_s)",
        new="now_s - self._ttl_s, 9e99)",
    ),
    cache(
        name="expired vectors are served",
        old="return not self._settings.ttl_s or abs(now_s - stored_s) < self._settings.ttl_s",
        new="return True",
    ),
    cache(
        name="vectors with NaN are cached",
        old=" for i, key in enumerate(keys) if finite[i]\n",
        new=" for i, key in enumerate(keys)\n",
    ),
    cache(
        name="memory evicts vectors that are used", old="                    self._entries.move_to_end(key)\n", new=""
    ),
    cache(name="vectors in memory have no limit of bytes", old=" or self._bytes > self._settings.bytes_max", new=""),
    infer(
        name="rows are not tested before tasks are joined",
        old="                if not _has_rows(self._model.forward(inputs), rows):\n                    return False\n",
        new="                self._model.forward(inputs)\n",
    ),
    gate(
        name="the gate passes every model", old="        passed = figure >= threshold\n", new="        passed = True\n"
    ),
    gate(name="a better correlation fails", old="passed = lost <= threshold", new="passed = abs(lost) <= threshold"),
    gate(name="the best output is judged", old="figure = float(np.min([", new="figure = float(np.max(["),
    precision(
        name="the model overrides the task's precision",
        old='_first(parameters.get("precision", ""), spec.precision, worker,',
        new='_first(spec.precision, parameters.get("precision", ""), worker,',
    ),
    precision(
        name="fp8 on any GPU",
        old="capability is not None and capability >= FP8_CAPABILITY",
        new="capability is not None",
    ),
    Mutation(
        name="a fixed dimension counts the examples",
        module=f"{ENGINES_PACKAGE}.infer.backend",
        old="if any(isinstance(each, int) for each in found) or len(found - {None}) > 1:",
        new="if len(found - {None}) > 1:",
        checker="gates",
    ),
    Mutation(
        name="the beginning of a stop string is sent",
        module=f"{ENGINES_PACKAGE}.generate.text",
        old="len(self._text) if ended or self.stopped else len(self._text) - self._held()",
        new="len(self._text)",
        checker="tokens",
    ),
    Mutation(
        name="more tokens than the context",
        module=f"{ENGINES_PACKAGE}.generate.payload",
        old="if room < 1 or tokens_max > room:",
        new="if room < 1:",
        checker="tokens",
    ),
    sample(
        name="the penalty rewards unlikely tokens",
        old="torch.where(scores < 0, scores * penalty, scores / penalty)",
        new="scores / penalty",
    ),
    sample(
        name="top_p excludes the token that crosses it",
        old="torch.searchsorted(sums, bound)",
        new="torch.searchsorted(sums, bound) - 1",
    ),
    paged(name="blocks in use are not counted", old="        self.used += count\n", new=""),
    paged(name="a query sees the next token", old="    seen = distance >= 0\n", new="    seen = distance >= -1\n"),
    Mutation(
        name="a plan with NaN passes its trial",
        module=f"{ENGINES_PACKAGE}.infer.tensorrt_backend",
        old="if not difference <= DIFFERENCE_MAX[precision]:",
        new="if difference > DIFFERENCE_MAX[precision]:",
        checker="plans",
    ),
    memory(
        name="device memory is freed without its context",
        old="        with self._memory.current():\n            self.allocation.free()\n",
        new="        self.allocation.free()\n",
    ),
)
