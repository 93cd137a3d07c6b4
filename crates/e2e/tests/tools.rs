//! Programs people run work on a mount as they do elsewhere: git, cargo, SQLite, rsync.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use ramet_e2e::tree::{Times, assert_same, synthesize};
use ramet_e2e::{Bed, run_ok, seeded};

fn sh(dir: &Path, script: &str) -> String {
    let script = format!("set -e; cd \"$1\"; {script}");
    run_ok(
        "bash",
        &[
            OsStr::new("-c"),
            script.as_ref(),
            "bash".as_ref(),
            dir.as_ref(),
        ],
    )
}

const GIT: &str = "git -c user.name=T -c user.email=t@example.org -c init.defaultBranch=main";

#[test]
fn git_works_on_a_mount_and_in_a_clone() {
    let bed = Bed::new("4G");
    let mut rng = seeded("git");
    let upstream = bed.path().join("upstream");
    synthesize(&upstream, 400, &mut rng).expect("the temporary folder is writable");
    sh(
        &upstream,
        &format!(
            "find . -type p -delete; {GIT} init -q; {GIT} add -A; {GIT} commit -qm one; echo x > more; {GIT} add -A; {GIT} commit -qm two"
        ),
    );
    let mount = bed.mount(&[]);
    let (work, copy) = (mount.root().join("work"), mount.root().join("copy"));
    run_ok(
        "git",
        &[
            OsStr::new("clone"),
            "-q".as_ref(),
            upstream.as_ref(),
            work.as_ref(),
        ],
    );
    sh(
        &work,
        "git fsck --full --strict; test -z \"$(git status --porcelain)\"",
    );
    mount.clone_path(&work, &copy);
    // Stable inode numbers and times: the copied index still describes the copied files.
    sh(
        &copy,
        "git fsck --full --strict; test -z \"$(git status --porcelain)\"",
    );
    sh(
        &copy,
        &format!("echo change >> more; {GIT} commit -qam three; git gc -q; git fsck --full"),
    );
    sh(
        &work,
        "test -z \"$(git status --porcelain)\"; ! git log --format=%s | grep -q three",
    );
    mount.umount();
    bed.fsck();
}

#[test]
fn cargo_builds_on_a_mount_and_in_a_clone() {
    let bed = Bed::new("4G");
    let mount = bed.mount(&[]);
    let hello = mount.root().join("hello");
    fs::create_dir_all(hello.join("src")).expect("the mount is writable");
    fs::write(
        hello.join("Cargo.toml"),
        "[package]\nname = \"hello\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n",
    )
    .expect("the mount is writable");
    fs::write(
        hello.join("src/main.rs"),
        "fn main() { println!(\"hello\"); }\n",
    )
    .expect("the mount is writable");
    let build = "unset CARGO_TARGET_DIR; cargo run -q --offline";
    assert_eq!(sh(&hello, build), "hello\n");
    let copy = mount.root().join("copy");
    mount.clone_path(&hello, &copy);
    fs::write(
        copy.join("src/main.rs"),
        "fn main() { println!(\"goodbye\"); }\n",
    )
    .expect("the mount is writable");
    assert_eq!(sh(&copy, build), "goodbye\n");
    assert_eq!(sh(&hello, build), "hello\n");
    mount.umount();
    bed.fsck();
}

#[test]
fn sqlite_keeps_its_integrity_in_every_journal_mode() {
    let bed = Bed::new("4G");
    let mount = bed.mount(&[]);
    for mode in ["delete", "wal"] {
        let db = mount.root().join(format!("{mode}.db"));
        let script = format!(
            "sqlite3 '{0}' 'PRAGMA journal_mode={mode}; CREATE TABLE t(k INTEGER PRIMARY KEY, v BLOB);
               CREATE INDEX i ON t(v);
               WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n WHERE x<20000)
               INSERT INTO t SELECT x, randomblob(100) FROM n;'
             for k in $(seq 50); do
               sqlite3 '{0}' \"UPDATE t SET v=randomblob(120) WHERE k % 97 = $k; DELETE FROM t WHERE k % 389 = $k;\"
             done
             test \"$(sqlite3 '{0}' 'PRAGMA integrity_check;')\" = ok",
            db.display()
        );
        sh(mount.root(), &script);
        let copy = mount.root().join(format!("{mode}-copy.db"));
        mount.clone_path(&db, &copy);
        let count = "SELECT count(*), total(length(v)) FROM t; PRAGMA integrity_check;";
        let counts = [&db, &copy].map(|db| run_ok("sqlite3", &[db.as_os_str(), count.as_ref()]));
        assert!(counts[0].ends_with("ok\n"), "{}", counts[0]);
        assert_eq!(counts[0], counts[1]);
    }
    mount.umount();
    bed.fsck();
}

#[test]
fn rsync_in_and_back_finds_no_difference() {
    let bed = Bed::new("4G");
    let mut rng = seeded("rsync");
    let (original, back) = (bed.path().join("original"), bed.path().join("back"));
    synthesize(&original, 1500, &mut rng).expect("the temporary folder is writable");
    let mount = bed.mount(&[]);
    let inside = mount.root().join("inside");
    let rsync = |options: &[&str], from: &Path, to: &Path| {
        let from = format!("{}/", from.display());
        let to = format!("{}/", to.display());
        // Else times within the same second count as equal.
        let mut args = vec!["--modify-window=-1"];
        args.extend(options);
        args.extend([from.as_str(), to.as_str()]);
        run_ok("rsync", &args)
    };
    let compare = [
        "-aHAX",
        "--checksum",
        "--dry-run",
        "--delete",
        "--itemize-changes",
    ];
    rsync(&["-aHAX"], &original, &inside);
    assert_eq!(rsync(&compare, &original, &inside), "");
    rsync(&["-aHAX"], &inside, &back);
    assert_eq!(rsync(&compare, &original, &back), "");
    assert_same(&original, &back, Times::Compare);
    mount.umount();
    bed.fsck();
}

#[test]
fn tar_finds_the_data_of_a_file_with_holes() {
    let bed = Bed::new("4G");
    let mount = bed.mount(&[]);
    sh(
        mount.root(),
        "head -c 8M /dev/urandom > file
         for round in 1 2; do fallocate -p -o 0 -l 4M file; done
         tar -cSf archive file; mkdir back; tar -xf archive -C back; cmp file back/file",
    );
    mount.umount();
    bed.fsck();
}

#[test]
fn plain_cp_of_a_file_takes_no_space() {
    let bed = Bed::new("4G");
    let mount = bed.mount(&[]);
    sh(mount.root(), "head -c 128M /dev/urandom > big");
    let before = mount.allocated_settled();
    sh(mount.root(), "cp big copy; cmp big copy");
    let grown = mount.allocated_settled().saturating_sub(before);
    assert!(grown <= 256 << 10, "cp of 128 MiB took {grown} bytes");
    mount.umount();
    bed.fsck();
}
