"""Users that stream without pause."""

from locust import HttpUser, constant, task

ASKED = {"text_input": "1, 2, 3,", "max_tokens": 4, "stream": True}


class User(HttpUser):
    wait_time = constant(0)

    @task
    def ask(self):
        address = "/v2/models/ensemble/generate_stream"
        with self.client.post(address, json=ASKED, stream=True, catch_response=True) as response:
            events = b"".join(response.iter_content(None)).count(b"data:")
            if events != ASKED["max_tokens"]:
                response.failure(f"{events} events")
