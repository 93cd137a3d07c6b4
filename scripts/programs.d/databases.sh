# Databases in a tree that was cloned while they were closed.

needs_sqlite="sqlite3 python3"
make_sqlite() {
    sqlite3 "$1/db" 'pragma journal_mode=wal; create table t(a integer primary key, b text);' \
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 5000) insert into t select i, 'text ' || i from n;"
}
use_sqlite() {
    cd "$1" || return
    sqlite3 db 'pragma integrity_check; select count(*), sum(a) from t;'
    python3 - "$1/db" "$2" <<'PY'
import sqlite3, sys, os
db = sqlite3.connect(sys.argv[1]); reader = sqlite3.connect(sys.argv[1])
print(db.execute("pragma journal_mode").fetchone())
reader.execute("begin"); print(reader.execute("select count(*) from t").fetchone())
for i in range(50):
    with db: db.execute("insert into t(b) values (?)", ("x" * 3000,))
print(reader.execute("select count(*) from t").fetchone(), sorted(os.listdir(os.path.dirname(sys.argv[1]))))
reader.rollback(); print(reader.execute("select count(*) from t").fetchone())
print(db.execute("pragma wal_checkpoint(truncate)").fetchone())
copy = sqlite3.connect(sys.argv[2] + "/backup"); db.backup(copy)
print(copy.execute("select count(*) from t").fetchone(), copy.execute("pragma integrity_check").fetchone())
db.execute(f"vacuum into '{sys.argv[2]}/vacuumed'")
pid = os.fork()
if pid == 0:
    other = sqlite3.connect(sys.argv[1]); other.execute("begin immediate"); other.execute("delete from t")
    os.kill(os.getpid(), 9)
os.waitpid(pid, 0)
print(sqlite3.connect(sys.argv[1]).execute("select count(*) from t").fetchone())
for mode in ["delete", "persist", "memory", "wal"]:
    print(db.execute(f"pragma journal_mode={mode}").fetchone())
    with db: db.execute("insert into t(b) values ('m')")
print(db.execute("pragma mmap_size=10000000").fetchone(), db.execute("select count(*) from t").fetchone())
PY
    sqlite3 db 'pragma integrity_check;'
    ls
}

needs_postgres="initdb pg_ctl pgbench"
root_postgres=1
postgres_bin() { compgen -G '/usr/lib/postgresql/*/bin' | tail -n 1; }
as_postgres() { setpriv --reuid postgres --regid postgres --init-groups env HOME=/tmp PATH="$PATH:$(postgres_bin)" "$@"; }
make_postgres() {
    chown postgres "$1"
    as_postgres initdb -D "$1/data" -A trust --no-locale -E UTF8 >/dev/null || return
    printf "listen_addresses=''\nmax_connections=10\nshared_buffers=16MB\n" >>"$1/data/postgresql.conf"
    chown -R postgres "$1"
}
use_postgres() {
    local data="$1/data"
    chown postgres "$2"
    rm -rf "/tmp/ramet-pg.$$" && mkdir "/tmp/ramet-pg.$$" && chown postgres "/tmp/ramet-pg.$$"
    pg() { as_postgres "$@" -h "/tmp/ramet-pg.$$"; }
    as_postgres pg_ctl -D "$data" -l "$2/log" -o "-k /tmp/ramet-pg.$$" -w start >/dev/null || { cat "$2/log"; return 1; }
    pg createdb bench
    pg pgbench -i -q -s 1 bench >/dev/null 2>&1
    pg pgbench -n -c 2 -t 150 bench 2>&1 | grep -E 'actually processed|failed'
    as_postgres mkdir "$2/space" && pg psql -q -d bench -c "create tablespace beside location '$2/space'" \
        -c 'create table far tablespace beside as select * from pgbench_accounts' -c 'select count(*) from far'
    as_postgres pg_ctl -D "$data" -m immediate -w stop >/dev/null
    as_postgres pg_ctl -D "$data" -l "$2/log" -o "-k /tmp/ramet-pg.$$" -w start >/dev/null
    pg psql -d bench -At -c 'select count(*) from pgbench_history' -c 'vacuum full' -c 'select count(*) from far' \
        -c 'drop table far' -c 'drop tablespace beside' -c 'create database copy template bench' -c checkpoint
    as_postgres pg_ctl -D "$data" -m fast -w stop >/dev/null
    as_postgres pg_checksums --check -D "$data" 2>&1 | tail -n 1
    grep -E 'PANIC|FATAL|corrupt' "$2/log"
    rm -rf "/tmp/ramet-pg.$$" "$2/log" "$2/space"
}
