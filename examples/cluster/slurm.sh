#!/bin/bash
# A Slurm job that trains on several machines: a node for sandboxes on each of them, the gateway and the run on the first.
#
#   sbatch --nodes=4 examples/cluster/slurm.sh examples/quickstart.yaml --output runs/quickstart
#
# The arguments are those of `envkit train`. The training file has no section `sandbox`, since its episodes are played on
# the gateway. envkit is at the same path on all machines, and they share the current folder. vLLM servers of the run are
# steps of this job (placement.launcher). The network is private: docs/many-machines.md.
#SBATCH --job-name=envkit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=envkit-%j.log
#SBATCH --signal=B:TERM@120
set -euo pipefail

envkit=${ENVKIT:-$(command -v envkit)}
port=$((20000 + SLURM_JOB_ID % 10000)) # another one for each job
url=http://$(hostname):$port
state=$(mktemp -d)                     # tokens and leases of the gateway: SQLite, so on a local disk
tokens=$PWD/.envkit-$SLURM_JOB_ID      # files that all machines read

end() {
    trap : TERM
    kill $(jobs -p) || true
    wait || true
    rm -rf "$state" "$tokens"
}
trap end EXIT
trap 'exit 143' TERM

umask 077
mkdir "$tokens"
"$envkit" token create --tenant nodes --scopes node --state "$state" >"$tokens/join"
"$envkit" token create --tenant run --scopes play --state "$state" >"$tokens/play"

"$envkit" serve --backend nodes --host 0.0.0.0 --port "$port" --state "$state" --set access_log=null &
gateway=$!
srun --overlap --mem=0 --ntasks-per-node=1 --kill-on-bad-exit=0 \
    "$envkit" serve --node --host 0.0.0.0 --port 0 --join "$url" --token-file "$tokens/join" &
until curl --silent --fail --output /dev/null "$url/v1/ready"; do
    kill -0 "$gateway"                 # otherwise there is nothing to wait for
    sleep 1
done

# Slurm's SIGTERM, two minutes before the end of the job's time, lets the run save a checkpoint.
"$envkit" train "$@" --set "env.url=$url" --set "env.token_file=$tokens/play" --set placement.launcher=slurm &
run=$!
trap 'kill -TERM "$run" && wait "$run"; exit 143' TERM
wait "$run"
