/* transfer: applies transfers between accounts with several threads.

   transfer THREADS PAUSE_MS < input; the first line of the input has the number of accounts (at most 64) and the amount
   that each has at first; every further line is "FROM TO AMOUNT". A transfer is done if FROM has at least AMOUNT, and
   is refused otherwise. It takes PAUSE_MS, in which its two accounts must not change otherwise, while transfers between
   other accounts go on. At the end, the program prints the amount of each account, then "done N" and "refused N". */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST = 64 };

static struct account {
    pthread_mutex_t lock;
    long amount;
} accounts[MOST];

static struct job {
    int from, to;
    long amount;
} *jobs;

static int number_of_accounts, number_of_jobs, next_job, done, refused, pause_ms;

static void transfer(struct job job)
{
    struct account *from = &accounts[job.from], *to = &accounts[job.to];
    if (from->amount < job.amount) {
        refused++;
        return;
    }
    pthread_mutex_lock(&from->lock);
    usleep(1000 * pause_ms);
    pthread_mutex_lock(&to->lock);
    from->amount -= job.amount;
    to->amount += job.amount;
    pthread_mutex_unlock(&from->lock);
    pthread_mutex_unlock(&to->lock);
    done++;
}

static void *work(void *unused)
{
    (void)unused;
    while (next_job < number_of_jobs)
        transfer(jobs[next_job++]);
    return NULL;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 4;
    long first;
    struct job job;
    pause_ms = argc > 2 ? atoi(argv[2]) : 0;
    if (threads < 1 || threads > 64 || scanf("%d %ld", &number_of_accounts, &first) != 2 || number_of_accounts > MOST)
        return 2;
    for (int i = 0; i < number_of_accounts; i++) {
        pthread_mutex_init(&accounts[i].lock, NULL);
        accounts[i].amount = first;
    }
    while (scanf("%d %d %ld", &job.from, &job.to, &job.amount) == 3) {
        jobs = realloc(jobs, (number_of_jobs + 1) * sizeof *jobs);
        jobs[number_of_jobs++] = job;
    }
    pthread_t workers[64];
    for (int i = 0; i < threads; i++)
        pthread_create(&workers[i], NULL, work, NULL);
    for (int i = 0; i < threads; i++)
        pthread_join(workers[i], NULL);
    for (int i = 0; i < number_of_accounts; i++)
        printf("%ld\n", accounts[i].amount);
    printf("done %d\nrefused %d\n", done, refused);
    free(jobs);
    return 0;
}
