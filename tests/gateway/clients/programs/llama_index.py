"""What a program does with LlamaIndex' classes for servers like OpenAI's. Arguments: as of langchain.py."""

import json
import sys
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

url, texts, talk = map(json.loads, sys.argv[1:])
at: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
embeddings = OpenAILikeEmbedding(model_name="all-MiniLM-L6-v2", **at)
chat = OpenAILike(model="tiny", is_chat_model=True, temperature=0, max_tokens=24, context_window=2048, **at)
messages = [ChatMessage(role=each["role"], content=each["content"]) for each in talk]
answer = chat.chat(messages)
found = {
    "documents": embeddings.get_text_embedding_batch(texts),
    "query": embeddings.get_query_embedding(texts[0]),
    "text": answer.message.content,
    "output_tokens": answer.raw.usage.completion_tokens,
    "pieces": [chunk.delta for chunk in chat.stream_chat(messages)],
}
try:
    OpenAILike(model="gpt-4o", is_chat_model=True, **at).chat(messages)
except openai.NotFoundError as error:
    found["error"] = error.code
print(json.dumps(found))
