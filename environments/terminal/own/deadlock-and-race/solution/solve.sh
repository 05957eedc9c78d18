#!/bin/bash
set -e
cd /workspace
python3 - <<'P'
from pathlib import Path
file = Path("transfer.c")
text = file.read_text()
start, end = text.index("static void transfer("), text.index("int main(")
file.write_text(text[:start] + """static pthread_mutex_t counters = PTHREAD_MUTEX_INITIALIZER;

static void transfer(struct job job)
{
    struct account *from = &accounts[job.from], *to = &accounts[job.to];
    struct account *first = from < to ? from : to, *second = from < to ? to : from;
    pthread_mutex_lock(&first->lock);
    if (second != first)
        pthread_mutex_lock(&second->lock);
    int possible = from->amount >= job.amount;
    if (possible) {
        usleep(1000 * pause_ms);
        from->amount -= job.amount;
        to->amount += job.amount;
    }
    if (second != first)
        pthread_mutex_unlock(&second->lock);
    pthread_mutex_unlock(&first->lock);
    pthread_mutex_lock(&counters);
    if (possible)
        done++;
    else
        refused++;
    pthread_mutex_unlock(&counters);
}

static void *work(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&counters);
        int index = next_job < number_of_jobs ? next_job++ : -1;
        pthread_mutex_unlock(&counters);
        if (index < 0)
            return NULL;
        transfer(jobs[index]);
    }
}

""" + text[end:])
P
make
