#!/bin/bash
# One lock around everything: nothing runs at the same time any more.
set -e
cd /workspace
sed -i 's/^static void transfer(/static pthread_mutex_t all = PTHREAD_MUTEX_INITIALIZER;\n\n&/
    /pthread_mutex_lock(&from->lock);/d; /pthread_mutex_lock(&to->lock);/d
    /pthread_mutex_unlock(&from->lock);/d; /pthread_mutex_unlock(&to->lock);/d
    s/^    while (next_job < number_of_jobs)$/    pthread_mutex_lock(\&all);\n&/
    s/^        transfer(jobs\[next_job++\]);$/&\n    pthread_mutex_unlock(\&all);/' transfer.c
make
