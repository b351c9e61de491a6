"""User messages: some whose answers copy much of the prompt, and others."""

_PASSAGE = """\
The lighthouse on the northern cape was built in 1871, after three ships had been lost on the reef within one winter. \
Its lamp burned colza oil until 1904, then paraffin, and since 1958 it has been electric. The keeper climbed 214 steps \
every four hours of the night to wind the clockwork that turned the lens. When the fog was too thick for the light, he \
fired a small cannon, once every ten minutes, until the weather cleared. The last keeper, Maria Lindqvist, left the \
island in 1983, when the lamp was connected to the mainland by cable and the station became automatic."""

_FUNCTION = """\
def monthly_report(orders, year, month):
    total = 0.0
    count = 0
    by_customer = {}
    for order in orders:
        if order.date.year != year or order.date.month != month:
            continue
        total += order.amount
        count += 1
        if order.customer not in by_customer:
            by_customer[order.customer] = 0.0
        by_customer[order.customer] += order.amount
    average = total / count if count else 0.0
    best = max(by_customer, key=by_customer.get) if by_customer else None
    return {"total": total, "count": count, "average": average, "best": best}"""

_SETTINGS = """\
[server]
host = "127.0.0.1"
port = 8080
workers = 4
timeout_seconds = 30

[database]
host = "127.0.0.1"
port = 5432
name = "inventory"
user = "app"
pool_size = 10
timeout_seconds = 5

[logging]
level = "info"
file = "/var/log/inventory.log"
rotate_megabytes = 100"""

_MINUTES = """\
Anna: The new warehouse in Rotterdam opens on the second of May. The contract with the carrier is signed.
Ben: The scanners are late. The supplier promised to deliver forty of them by the end of April.
Anna: Without scanners we cannot open. Please ask the supplier for a firm date, and get an offer from another one.
Chen: The software for the new site is tested. What is missing is the connection to the customs office.
Ben: I will call the supplier today and send everybody the answer by Friday."""

# The answer consists mostly of text from the prompt: quotes and edits.
COPY_HEAVY = (
    f"Repeat the following passage word for word.\n\n{_PASSAGE}",
    f"Rename total to revenue in this function, and give the whole function.\n\n```python\n{_FUNCTION}\n```",
    f"Change the database port to 5433 and give the whole file.\n\n```toml\n{_SETTINGS}\n```",
    f"Quote what each person said in these minutes, then list who does what.\n\n{_MINUTES}",
)

# The answer is new text.
OTHERS = (
    "Write a short story about a fox who wants to learn to swim.",
    "Explain to a child why the sky is blue in the day and red in the evening.",
    "What should one think about before buying a used bicycle?",
    "Describe how bread is made, from the grain to the loaf.",
)

SYSTEM = """\
You are the assistant of a small publishing house. You answer questions about texts, edit them, and write new ones. \
Answer in the language of the question. Be brief and exact: do not begin with a greeting, do not apologise, and do not \
repeat the question. When you are asked to quote or to edit a text, give the whole text, and change nothing but what \
you were asked to change. When you are asked for code, give the code first and then one sentence about it. When \
you do not know something, say so in one sentence. Never invent names, numbers or dates. Numbers below ten are written \
as words unless they are measurements. Titles of books are written in italics, titles of articles in quotation marks."""
