"""What a program does with langchain-openai. Arguments: the gateway's URL, texts, messages."""

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, texts, talk = map(json.loads, sys.argv[1:])
at: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
# Else it sends token ids of OpenAI's tokenizer.
embeddings = OpenAIEmbeddings(model="all-MiniLM-L6-v2", check_embedding_ctx_length=False, **at)
chat = ChatOpenAI(model="tiny", temperature=0, max_completion_tokens=24, **at)
answer = chat.invoke(talk)
found = {
    "documents": embeddings.embed_documents(texts),
    "query": embeddings.embed_query(texts[0]),
    "text": answer.content,
    "output_tokens": answer.usage_metadata["output_tokens"],
    "pieces": [chunk.content for chunk in chat.stream(talk)],
}
try:
    ChatOpenAI(model="gpt-4o", **at).invoke(talk)
except openai.NotFoundError as error:
    found["error"] = error.code
print(json.dumps(found))
