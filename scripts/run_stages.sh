#!/bin/sh
# Runs stages one after the other, and says at the end how long each took.
#
#     sh scripts/run_stages.sh "NAME: COMMAND"...
#
# The first that fails is the last that runs, and its status is that of this script.
# Ctrl-C ends a stage, and is such a failure.

trap : INT
took=
status=0
for stage in "$@"; do
    begun=$(date +%s)
    sh -c "${stage#*: }" || status=$?
    took="$took, ${stage%%: *} $(($(date +%s) - begun)) s"
    if [ "$status" != 0 ]; then
        took="$took (failed with status $status)"
        break
    fi
done
echo "stages: ${took#, }"
exit "$status"
