"""Clients and fork: in a child of a process that has used gRPC, clients raise, and the child ends without errors."""

import subprocess
import sys
import textwrap

import pytest

from tests.client.scripted_master import ThreadedMaster

BEGIN = """
import asyncio, gc, itertools, multiprocessing, os, sys, multigpu

def rejection(call):
    try:
        call()
    except multigpu.MultigpuError as error:
        return "spawn" in str(error) and "forkserver" in str(error)
    return False

def exit_code(child, *arguments):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        sys.exit(child(*arguments))  # runs finalizers and the interpreter's exit handlers
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

address = sys.argv[1]
"""
AFTER_A_USE = {
    "a new client": """
        with multigpu.Client(address) as client:
            client.run("echo", 1)
        def child():
            made = [lambda: multigpu.Client(address), lambda: multigpu.AsyncClient(address)]
            return 7 if all([rejection(make) for make in made]) else 8
        print({exit_code(child) for _ in range(5)}, multigpu.Client(address).run("echo", 5))
    """,
    "an inherited client": """
        client = multigpu.Client(address)
        client.run("echo", 1)
        stream, mapped = client.stream("echo", b"go"), client.map("echo", itertools.count())
        next(stream), next(mapped)
        def child():
            global client, stream, mapped
            calls = [lambda: client.run("echo", 1), lambda: client.submit("echo", 1), lambda: client.get(1)]
            calls += [lambda: client.map("echo", [1]), lambda: client.stream("echo", 1), lambda: client.embed(["a"])]
            calls += [lambda: next(client.watch()), lambda: next(stream), lambda: list(mapped)]
            rejected = all([rejection(call) for call in calls])
            client.close()
            client = stream = mapped = calls = None
            gc.collect()
            return 7 if rejected else 8
        print({exit_code(child) for _ in range(5)}, client.run("echo", 5))
    """,
    "an inherited AsyncClient": """
        client = multigpu.AsyncClient(address)
        def child():
            global client
            async def calls():
                async def listed(call, *arguments):
                    return [item async for item in call(*arguments)]
                calls = [client.run("echo", 1), client.submit("echo", 1), listed(client.map, "echo", [1])]
                calls += [listed(client.stream, "echo", 1), client.get(1), client.embed(["a"])]
                found = await asyncio.gather(*calls, return_exceptions=True)
                await client.close()
                return found
            found = asyncio.run(calls())
            client = None
            gc.collect()
            return 7 if all([isinstance(e, multigpu.ClientClosedError) and "spawn" in str(e) for e in found]) else 8
        async def main():
            assert await client.run("echo", 1) == 1
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=lambda: sys.exit(child())) for _ in range(5)]
            for each in children:
                each.start()
            for each in children:
                await asyncio.to_thread(each.join)
            print({each.exitcode for each in children}, await client.run("echo", 5))
            await client.close()
        asyncio.run(main())
    """,
    "embeddings": """
        from multigpu.langchain import MultiGpuEmbeddings
        embeddings = MultiGpuEmbeddings(master=address)
        try:
            embeddings.embed_query("text")
        except Exception:
            pass  # the master of this test embeds nothing; it was asked
        def child():
            calls = [lambda: embeddings.embed_query("text"), lambda: embeddings.embed_documents(["text"])]
            calls += [lambda: asyncio.run(embeddings.aembed_query("text")), lambda: MultiGpuEmbeddings(master=address)]
            rejected = all([rejection(call) for call in calls])
            embeddings.close()
            return 7 if rejected else 8
        print({exit_code(child) for _ in range(5)}, multigpu.Client(address).run("echo", 5))
    """,
}


def run(program: str, address: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + textwrap.dedent(program), address]
    done = subprocess.run(command, capture_output=True, timeout=400, text=True, check=False)
    for sign in ("Traceback", "Exception ignored", "Fatal"):
        assert sign not in done.stderr, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", AFTER_A_USE)
def test_clients_raise_in_a_child_of_a_process_that_used_grpc(name: str) -> None:
    if name == "embeddings":
        pytest.importorskip("langchain_core", reason="the extra `langchain` is not installed")
    with ThreadedMaster() as master:
        master.partials[b"go"] = [b"a", b"b"]
        done = run(AFTER_A_USE[name], master.address)
        assert (done.returncode, done.stdout) == (0, "{7} 5\n"), done.stderr


def test_a_fork_before_the_first_use_does_no_harm() -> None:
    program = """
        unused = multigpu.AsyncClient(address)
        def child():
            async def main():
                async with unused:
                    return await unused.run("echo", 3)
            with multigpu.Client(address) as client:
                return client.run("echo", 4) + asyncio.run(main())
        print(*[exit_code(child) for _ in range(3)], multigpu.Client(address).run("echo", 5))
    """
    with ThreadedMaster() as master:
        done = run(program, master.address)
        assert (done.returncode, done.stdout) == (0, "7 7 7 5\n"), done.stderr
