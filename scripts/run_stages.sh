#!/bin/sh
# Runs stages one after the other, and says at the end how long each took.
#
#     sh scripts/run_stages.sh "NAME: COMMAND"...
#
# A stage of the name "NAME&" runs beside those that follow. The last one waits for it,
# and what it has said is shown then. Its command should begin with exec, since only the
# process that it starts is ended where another stage fails.
#
# The first that fails is the last that runs, and its status is that of this script.
# Ctrl-C ends a stage, and is such a failure.

files=$(mktemp -d) || exit
trap 'rm -rf "$files"' EXIT
trap : INT
took=
status=0
beside=

# NAME BEGUN STATUS
ended() {
    took="$took, $1 $(($(date +%s) - $2)) s"
    if [ "$3" != 0 ]; then
        took="$took (failed with status $3)"
        [ "$status" != 0 ] || status=$3
    fi
}

# NAME COMMAND; the shell lets what it begins so ignore Ctrl-C. A signal that comes before
# the new process is a program of its own is lost, so it is sent until the process is gone.
run_beside() {
    trap 'while kill $! 2>/dev/null; do sleep 0.1; done; exit' TERM
    sh -c "$2" >"$files/$1" 2>&1 &
    wait $!
    echo "$? $(date +%s)" >"$files/$1.end"
}

# Waits for what runs beside, or ends it where another stage has failed.
join() {
    for each in $beside; do
        IFS=: read -r other process since <<END
$each
END
        [ "$status" = 0 ] || kill "$process" 2>/dev/null
        wait "$process"
        [ "$status" = 0 ] || continue
        cat "$files/$other"
        read -r result until <"$files/$other.end"
        ended "$other" "$(($(date +%s) - until + since))" "$result"
    done
    beside=
}

left=$#
for stage in "$@"; do
    left=$((left - 1))
    name=${stage%%: *} begun=$(date +%s)
    case $name in
    *"&")
        name=${name%&}
        run_beside "$name" "${stage#*: }" &
        beside="$beside $name:$!:$begun"
        continue
        ;;
    esac
    if [ "$left" = 0 ]; then
        join
        [ "$status" = 0 ] || break
        begun=$(date +%s)
    fi
    code=0
    sh -c "${stage#*: }" || code=$?
    ended "$name" "$begun" "$code"
    [ "$status" = 0 ] || break
done
join
echo "stages: ${took#, }"
exit "$status"
