//! Forks of git trees, with git itself.

use std::fs;
use std::path::Path;
use std::process::Output;

use ramet_e2e::{Bed, Mount, ramet_bin, run, run_ok};

/// A mount with a git tree `project` that has a commit.
struct Desk {
    /// Before the folder, which it must leave first.
    mount: Mount,
    bed: Bed,
}

fn said(out: &Output) -> String {
    let both = [&out.stdout[..], &out.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

impl Desk {
    fn new() -> Desk {
        let bed = Bed::new("256M");
        let mount = bed.mount(&[]);
        let desk = Desk { mount, bed };
        fs::create_dir(desk.at("project")).expect("there is room");
        desk.write("project/file", "first");
        desk.git("project", &["init", "-q", "-b", "main"]);
        desk.git("project", &["add", "."]);
        desk.git("project", &["commit", "-q", "-m", "first"]);
        desk
    }

    fn at(&self, name: &str) -> String {
        let path = self.mount.root().join(name);
        path.to_str().expect("temporary paths are UTF-8").to_owned()
    }

    fn exists(&self, name: &str) -> bool {
        Path::new(&self.at(name)).exists()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).expect("there is room");
    }

    fn git(&self, dir: &str, args: &[&str]) -> String {
        let dir = self.at(dir);
        let fixed = [
            "60",
            "git",
            "-C",
            &dir,
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@example.org",
        ];
        run_ok("timeout", &[&fixed[..], args].concat())
            .trim()
            .to_owned()
    }

    fn ramet(&self, args: &[&str]) -> Output {
        run(ramet_bin(), args)
    }

    fn end(self) {
        self.mount.umount();
        self.bed.fsck();
    }
}

#[test]
fn locks_of_programs_that_work_on_the_original_are_not_in_a_fork() {
    const LOCKS: [&str; 6] = [
        "index.lock",
        "HEAD.lock",
        "refs/heads/main.lock",
        "gc.pid",
        "objects/info/commit-graph.lock",
        "modules/m/index.lock",
    ];
    let desk = Desk::new();
    fs::create_dir_all(desk.at("project/.git/modules/m")).expect("there is room");
    for lock in LOCKS {
        desk.write(&format!("project/.git/{lock}"), "1");
    }
    desk.write("project/tracked.lock", "kept");
    let out = desk.ramet(&["fork", &desk.at("project")]);
    assert!(
        out.status.success() && out.stderr.is_empty(),
        "{}",
        said(&out)
    );
    for lock in LOCKS {
        assert!(desk.exists(&format!("project/.git/{lock}")), "{lock}");
        assert!(
            !desk.exists(&format!("project-fork-1/.git/{lock}")),
            "{lock}"
        );
    }
    assert!(desk.exists("project-fork-1/tracked.lock"));
    desk.git(
        "project-fork-1",
        &["commit", "-q", "--allow-empty", "-m", "second"],
    );
    desk.end();
}

#[test]
fn a_linked_worktree_is_not_forked() {
    let desk = Desk::new();
    desk.git("project", &["worktree", "add", "-q", "../linked"]);
    let linked = desk.at("linked");
    for args in [
        &["fork", &linked][..],
        &["try", "--keep", &linked, "--", "true"],
        &["try", "--keep", "--own-path", &linked, "--", "true"],
    ] {
        let out = desk.ramet(args);
        assert!(!out.status.success(), "{args:?}");
        assert!(said(&out).contains("linked worktree"), "{}", said(&out));
    }
    std::os::unix::fs::symlink(desk.at("project/.git"), desk.at("by-link")).expect("there is room");
    fs::create_dir(desk.at("other")).expect("there is room");
    fs::rename(desk.at("by-link"), desk.at("other/.git")).expect("it is free");
    assert!(!desk.ramet(&["fork", &desk.at("other")]).status.success());
    for fork in ["linked-fork-1", "linked.try-1", "other-fork-1"] {
        assert!(!desk.exists(fork), "{fork}");
    }
    desk.end();
}

#[test]
fn worktrees_of_the_original_are_none_of_a_fork() {
    let desk = Desk::new();
    desk.git("project", &["worktree", "add", "-q", "../linked"]);
    desk.git("project", &["worktree", "add", "-q", "inner/tree"]);
    let before = desk.git("project", &["for-each-ref"]);
    let out = desk.ramet(&["fork", &desk.at("project")]);
    assert!(
        out.status.success() && out.stderr.is_empty(),
        "{}",
        said(&out)
    );
    let fork = "project-fork-1";
    let listed = desk.git(fork, &["worktree", "list", "--porcelain"]);
    let trees: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.strip_prefix("worktree "))
        .collect();
    assert_eq!(trees, [desk.at(fork), desk.at("project-fork-1/inner/tree")]);
    // A commit in each tree of the fork moves branches of the fork.
    for dir in ["project-fork-1", "project-fork-1/inner/tree"] {
        desk.git(dir, &["commit", "-q", "--allow-empty", "-m", "in the fork"]);
    }
    desk.git(fork, &["worktree", "prune"]);
    desk.git(fork, &["fsck", "--strict"]);
    let head = |dir: &str| desk.git(dir, &["rev-parse", "HEAD"]);
    assert_eq!(desk.git("project", &["for-each-ref"]), before);
    assert_eq!(head("project"), head("linked"));
    assert_ne!(
        head("project/inner/tree"),
        head("project-fork-1/inner/tree")
    );
    assert_eq!(
        desk.git("project-fork-1", &["rev-parse", "tree"]),
        head("project-fork-1/inner/tree")
    );
    let listed = desk.git("project", &["worktree", "list"]);
    assert_eq!(listed.lines().count(), 3, "{listed}");
    desk.end();
}

#[test]
fn paths_that_lead_out_of_a_repository_are_told() {
    let desk = Desk::new();
    let (project, shared) = (desk.at("project"), desk.at("shared"));
    desk.git("project", &["clone", "-q", "--shared", &project, &shared]);
    desk.git("shared", &["config", "core.hooksPath", "/etc/hooks"]);
    let out = desk.ramet(&["fork", &shared]);
    assert!(out.status.success(), "{}", said(&out));
    let told = said(&out);
    for words in ["project/.git/objects", "core.hooksPath", "/etc/hooks"] {
        assert!(told.contains(words), "{told}");
    }
    assert!(!told.contains("core.worktree"), "{told}");
    desk.git("project", &["config", "core.worktree", &project]);
    let out = desk.ramet(&["try", "--discard", &project, "--", "true"]);
    assert!(said(&out).contains("core.worktree"), "{}", said(&out));
    desk.end();
}

#[test]
fn a_commit_keeps_a_fork_whose_repository_has_more_than_branches() {
    let desk = Desk::new();
    let project = desk.at("project");
    let git = "git -c user.name=A -c user.email=a@example.org";
    // (script, words of the reason; none if the fork goes)
    for (number, (script, why)) in [
        (format!("echo 1 > file && {git} commit -qam second"), None),
        (
            format!("echo 2 > file && {git} stash -q && echo 3 > file"),
            Some("refs/stash"),
        ),
        (
            "echo 4 > file && git tag t HEAD".to_owned(),
            Some("refs/tags/t"),
        ),
        (
            "echo 5 > file && mkdir -p .git/lfs/objects && echo x > .git/lfs/objects/a".to_owned(),
            Some("lfs"),
        ),
        (
            "echo 6 > file && mkdir -p .git/modules/m && echo x > .git/modules/m/HEAD".to_owned(),
            Some("modules"),
        ),
        (
            "echo 7 > file && git config a.b c".to_owned(),
            Some("config"),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let fork = format!("fork-{number}");
        let args = ["try", "--commit", "--name", &desk.at(&fork), &project, "--"];
        let out = desk.ramet(&[&args[..], &["sh", "-c", &script]].concat());
        assert!(out.status.success(), "{script}: {}", said(&out));
        assert_eq!(
            desk.exists(&fork),
            why.is_some(),
            "{script}: {}",
            said(&out)
        );
        if let Some(why) = why {
            assert!(said(&out).contains(why), "{script}: {}", said(&out));
            assert!(
                said(&out).contains("ramet drop"),
                "{script}: {}",
                said(&out)
            );
        }
    }
    let file = fs::read_to_string(desk.at("project/file")).expect("it is there");
    assert_eq!(file, "7\n");
    desk.end();
}
