//! Forks of git trees, with git itself.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use ramet_e2e::{Bed, Mount, number, ramet_bin, run, run_ok, seeded};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

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

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

/// Gives the mount to [`USER`], closes directories of the repository as that user would, and runs
/// the command as that user.
fn ramet_as_user(desk: &Desk, modes: &[(&str, u32)], args: &[&str]) -> Output {
    run_ok("chown", &["-R", &USER.to_string(), &desk.at("")]);
    for (dir, mode) in modes {
        let path = desk.at(&format!("project/.git/{dir}"));
        fs::set_permissions(path, fs::Permissions::from_mode(*mode)).expect("tests run as root");
    }
    let mut command = Command::new(desk.bed.command_for_others());
    command.args(args).uid(USER).gid(USER);
    command.output().expect("the command runs")
}

#[test]
fn a_lock_that_stays_ends_no_settling_of_worktrees() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no other user can run the command");
        return;
    }
    let desk = Desk::new();
    desk.git("project", &["worktree", "add", "-q", "inner"]);
    for dir in ["closed", "held", "open"] {
        fs::create_dir(desk.at(&format!("project/.git/{dir}"))).expect("there is room");
        desk.write(&format!("project/.git/{dir}/one.lock"), "1");
    }
    let modes = [("closed", 0), ("held", 0o555)];
    let out = ramet_as_user(&desk, &modes, &["fork", &desk.at("project")]);
    let text = said(&out);
    assert!(out.status.success(), "{text}");
    for told in [
        "project-fork-1/.git/closed:",
        "project-fork-1/.git/held/one.lock:",
    ] {
        assert!(text.contains(told), "{told} in {text}");
    }
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(!desk.exists("project-fork-1/.git/open/one.lock"));
    let led = fs::read_to_string(desk.at("project-fork-1/inner/.git")).expect("it was forked");
    assert!(
        led.contains("/project-fork-1/.git/worktrees/inner"),
        "{led}"
    );
    desk.end();
}

#[test]
fn a_tree_whose_worktrees_cannot_be_settled_is_not_forked() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no other user can run the command");
        return;
    }
    let desk = Desk::new();
    desk.git("project", &["worktree", "add", "-q", "inner"]);
    let project = desk.at("project");
    for modes in [
        [("worktrees", 0), ("worktrees/inner", 0o755)],
        [("worktrees", 0o755), ("worktrees/inner", 0)],
    ] {
        for args in [
            &["fork", &project][..],
            &["try", "--own-path", "--keep", &project, "--", "true"],
        ] {
            let out = ramet_as_user(&desk, &modes, args);
            let text = said(&out);
            assert!(!out.status.success(), "{modes:?} {args:?}: {text}");
            assert!(text.contains("not forked"), "{text}");
            assert!(text.contains("ramet clone"), "{text}");
        }
        for fork in ["project-fork-1", "project.try-1"] {
            assert!(!desk.exists(fork), "{modes:?}: {fork}");
        }
    }
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

/// The repository that git works on in a directory.
fn repository_of(desk: &Desk, dir: &str) -> String {
    desk.git(dir, &["rev-parse", "--absolute-git-dir"])
}

#[test]
fn a_merge_leaves_worktrees_and_submodules_of_the_fork_there() {
    let desk = Desk::new();
    desk.repository("module", &[]);
    let out = desk.ramet(&["fork", &desk.at("project"), &desk.at("fork")]);
    assert!(out.status.success(), "{}", said(&out));
    desk.git("fork", &["worktree", "add", "-q", "linked"]);
    desk.git("fork", &["worktree", "add", "-q", "new/deep/linked-too"]);
    let allow = ["-c", "protocol.file.allow=always"];
    let add = ["submodule", "add", "-q", &desk.at("module"), "sub"];
    desk.git("fork", &[&allow[..], &add].concat());
    // A repository that is whole by itself.
    desk.git("fork", &["init", "-q", "own"]);
    desk.git("fork/own", &["commit", "-q", "--allow-empty", "-m", "own"]);
    desk.write("fork/linked/file", "in the worktree");
    desk.git("fork/linked", &["commit", "-q", "-a", "-m", "linked"]);
    desk.write("fork/plain", "new");
    let commit = desk.git("fork/linked", &["rev-parse", "HEAD"]);
    let merge = |args: &[&str]| {
        let out = desk.ramet(&[&["merge"], args].concat());
        assert!(out.status.success(), "{}", said(&out));
        let told = said(&out);
        for tree in ["linked", "new/deep/linked-too", "sub"] {
            let words = format!("{tree}: left in the fork");
            assert!(told.contains(&words), "{tree}: {told}");
        }
        assert!(desk.exists("project/plain"), "{told}");
        for dir in ["linked", "new", "sub"] {
            assert!(!desk.exists(&format!("project/{dir}")), "{dir}: {told}");
        }
    };
    merge(&[&desk.at("fork")]);
    assert_eq!(
        desk.git("project", &["rev-parse", "refs/forks/fork/linked"]),
        commit
    );
    assert_eq!(
        repository_of(&desk, "project/own"),
        desk.at("project/own/.git")
    );
    // The paths of worktrees are old in a fork that was renamed.
    fs::rename(desk.at("fork"), desk.at("moved")).expect("it is free");
    merge(&[&desk.at("moved")]);
    desk.end();
}

#[test]
fn a_refresh_leaves_worktrees_in_the_fork_as_it_was() {
    let desk = Desk::new();
    desk.git("project", &["worktree", "add", "-q", "before"]);
    let out = desk.ramet(&["fork", &desk.at("project"), &desk.at("fork")]);
    assert!(out.status.success(), "{}", said(&out));
    desk.git("fork", &["worktree", "add", "-q", "linked"]);
    desk.write("fork/linked/file", "in the worktree");
    let out = desk.ramet(&["refresh", &desk.at("fork")]);
    assert!(out.status.success(), "{}", said(&out));
    let told = said(&out);
    assert!(told.contains("linked: left in the fork"), "{told}");
    assert!(!desk.exists("fork/linked"), "{told}");
    for (tree, top) in [
        ("before", "fork"),
        ("before", "fork.refresh-1"),
        ("linked", "fork.refresh-1"),
    ] {
        assert_eq!(
            repository_of(&desk, &format!("{top}/{tree}")),
            desk.at(&format!("{top}/.git/worktrees/{tree}"))
        );
        let listed = desk.git(top, &["worktree", "list"]);
        let path = desk.at(&format!("{top}/{tree}"));
        assert!(listed.contains(&format!("{path} ")), "{listed}");
    }
    assert_eq!(
        desk.git("fork.refresh-1/linked", &["status", "--porcelain"]),
        "M file"
    );
    desk.end();
}

#[test]
fn a_worktree_that_a_try_made_keeps_the_fork() {
    let desk = Desk::new();
    let project = desk.at("project");
    let script = "git worktree add -q linked && echo new > plain";
    let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", script]);
    assert!(out.status.success(), "{}", said(&out));
    let told = said(&out);
    assert!(told.contains("linked is a linked worktree"), "{told}");
    assert!(desk.exists("project/plain") && !desk.exists("project/linked"));
    assert_eq!(
        repository_of(&desk, "project.try-1/linked"),
        desk.at("project.try-1/.git/worktrees/linked")
    );
    desk.end();
}

#[test]
fn a_worktree_that_a_try_leaves_alone_keeps_no_fork() {
    let desk = Desk::new();
    let project = desk.at("project");
    desk.git("project", &["worktree", "add", "-q", "inner/tree"]);
    let git = "git -c user.name=A -c user.email=a@example.org";
    let tried = |script: &str| {
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", script]);
        assert!(out.status.success(), "{script}: {}", said(&out));
        said(&out)
    };
    assert_eq!(tried("true"), "nothing changed\n");
    for script in [
        "echo second > file".to_owned(),
        format!("{git} commit -qam second && {git} -C inner/tree status > ../status"),
        // Both trees have it, so its files are merged.
        "echo third > inner/tree/file".to_owned(),
    ] {
        let told = tried(&script);
        assert!(!told.contains("kept"), "{script}: {told}");
        assert!(!told.contains("inner/tree/.git"), "{script}: {told}");
        assert!(!desk.exists("project.try-1"), "{script}: {told}");
        let repository = desk.at("project/.git/worktrees/tree");
        assert_eq!(repository_of(&desk, "project/inner/tree"), repository);
    }
    let read = |name: &str| fs::read_to_string(desk.at(name)).expect("it is there");
    assert_eq!(read("project/file"), "second\n");
    assert_eq!(read("project/inner/tree/file"), "third\n");
    // The log of a commit in the worktree, and other files of its entry, are in the fork alone.
    let scripts = [
        format!("cd inner/tree && {git} commit -qam third"),
        "git worktree lock inner/tree".to_owned(),
    ];
    for (number, script) in (1..).zip(scripts) {
        let told = tried(&script);
        let fork = format!("project.try-{number}");
        assert!(told.contains("worktrees/tree/"), "{script}: {told}");
        assert!(desk.exists(&fork), "{script}: {told}");
    }
    desk.end();
}

/// A directory that git ignores and that is to be taken as a whole stays behind with its worktrees.
#[test]
fn a_worktree_in_an_ignored_directory_hides_no_work_that_a_try_leaves_behind() {
    let desk = Desk::new();
    let project = desk.at("project");
    fs::write(desk.at("project/.gitignore"), ".worktrees/\n.env\n").expect("ours");
    let git = |args: &[&str]| desk.git("project", args);
    git(&["add", ".gitignore"]);
    git(&[
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@e.org",
        "commit",
        "-qm",
        "ignore",
    ]);
    for (number, script) in [
        (1, "echo agent > .worktrees/one/file"),
        (2, "echo secret > .env"),
    ] {
        let tree = [".worktrees/one", ".worktrees/two"][number - 1];
        git(&["worktree", "add", "-q", tree]);
        let mut args = vec!["try", "--commit", "--ignored", "take", &project];
        args.extend(["--", "sh", "-c", script]);
        let told = said(&desk.ramet(&args));
        assert!(
            desk.exists(&format!("project.try-{number}")),
            "{script}: {told}"
        );
    }
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
            format!(
                "echo 3 > file && {git} commit -qam third && git update-ref refs/forks/x/HEAD HEAD"
            ),
            None,
        ),
        (
            "echo 3 > file && git update-ref refs/forks/y/HEAD \
             $(git -c user.name=A -c user.email=a@example.org commit-tree -m y HEAD^{tree})"
                .to_owned(),
            Some("refs/forks/y/HEAD"),
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
    // A branch that no fetch sees.
    let hidden = "refs/heads/hidden";
    desk.git("project", &["config", "transfer.hideRefs", hidden]);
    let script = format!(
        "git checkout -qb hidden && {git} commit -qam h && git checkout -q - && echo 8 > file"
    );
    let args = ["try", "--commit", &project, "--", "sh", "-c", &script];
    let out = desk.ramet(&args);
    assert!(
        out.status.success() && said(&out).contains(hidden),
        "{}",
        said(&out)
    );
    desk.git("project.try-1", &["rev-parse", hidden]);
    desk.end();
}

/// Numbers in the index by their paths.
fn cached_numbers(desk: &Desk, dir: &str) -> BTreeMap<String, u64> {
    let told = desk.git(dir, &["ls-files", "--debug"]);
    let (mut numbers, mut path) = (BTreeMap::new(), "");
    for line in told.lines() {
        match line.strip_prefix("  ") {
            None => path = line,
            Some(field) => {
                if let Some((_, number)) = field.split_once("ino: ") {
                    numbers.insert(path.to_owned(), number.trim().parse().expect("a number"));
                }
            }
        }
    }
    numbers
}

impl Desk {
    /// Changes the time of modification of a file.
    fn touch(&self, name: &str, ago: Duration) {
        let file = fs::File::options().write(true).open(self.at(name));
        let time = SystemTime::now() - ago;
        file.expect("is there").set_modified(time).expect("is ours");
    }

    /// Files in several directories of the new repository `dir`, all added and older than the index.
    fn repository(&self, dir: &str, options: &[&str]) -> Vec<String> {
        fs::create_dir(self.at(dir)).expect("there is room");
        self.git(dir, &[&["init", "-q", "-b", "main"], options].concat());
        let mut paths = Vec::new();
        for below in ["", "a/", "a/b/", "c/"] {
            fs::create_dir_all(self.at(&format!("{dir}/{below}"))).expect("there is room");
            for number in 0..30 {
                let path = format!("{below}file{number}");
                self.write(&format!("{dir}/{path}"), &format!("{path}\n"));
                self.touch(&format!("{dir}/{path}"), Duration::from_secs(60));
                paths.push(path);
            }
        }
        self.git(dir, &["add", "."]);
        self.git(dir, &["commit", "-q", "-m", "first"]);
        paths
    }

    /// Asserts that git trusts the index about each of these files: it has their numbers,
    /// and a look at all files leaves it to the byte.
    fn knows(&self, dir: &str, paths: &[String]) {
        let cached = cached_numbers(self, dir);
        for path in paths {
            let stat = fs::symlink_metadata(self.at(&format!("{dir}/{path}"))).expect("is there");
            assert_eq!(cached.get(path), Some(&stat.ino()), "{dir}/{path}");
        }
        let index = self.at(&format!("{dir}/.git/index"));
        let before = fs::read(&index).expect("is there");
        assert_eq!(self.git(dir, &["status", "--porcelain"]), "");
        assert!(fs::read(&index).expect("is there") == before, "{dir}");
    }
}

#[test]
fn git_trusts_the_files_of_a_fork_at_once() {
    let desk = Desk::new();
    for (number, (options, version)) in [
        (&["--object-format=sha1"][..], "2"),
        (&["--object-format=sha1"], "4"),
        (&["--object-format=sha256"], "2"),
        (&["--object-format=sha256"], "4"),
    ]
    .into_iter()
    .enumerate()
    {
        let source = format!("source{number}");
        let paths = desk.repository(&source, options);
        desk.git(&source, &["update-index", "--index-version", version]);
        desk.knows(&source, &paths);
        let modified = |dir: &str| {
            let stat = fs::metadata(desk.at(&format!("{dir}/.git/index"))).expect("is there");
            (stat.mtime(), stat.mtime_nsec(), stat.mode())
        };
        let fork = format!("{source}-fork-1");
        let out = desk.ramet(&["fork", &desk.at(&source)]);
        assert!(
            out.status.success() && out.stderr.is_empty(),
            "{}",
            said(&out)
        );
        assert_eq!(modified(&fork), modified(&source));
        desk.knows(&fork, &paths);
        // A fork of a fork.
        let out = desk.ramet(&[
            "fork",
            &desk.at(&fork),
            &desk.at(&format!("{source}-second")),
        ]);
        assert!(
            out.status.success() && out.stderr.is_empty(),
            "{}",
            said(&out)
        );
        desk.knows(&format!("{source}-second"), &paths);
        desk.git(&fork, &["fsck", "--strict"]);
        let names = fs::read_dir(desk.at(&format!("{fork}/.git"))).expect("is there");
        for name in names {
            let name = name.expect("is there").file_name();
            assert!(!name.to_string_lossy().contains("lock"), "{name:?}");
        }
        // Files with several names, and one that came from another directory.
        fs::hard_link(
            desk.at(&format!("{source}/a/file1")),
            desk.at(&format!("{source}/linked")),
        )
        .expect("there is room");
        fs::rename(
            desk.at(&format!("{source}/a/file2")),
            desk.at(&format!("{source}/c/moved")),
        )
        .expect("there is room");
        desk.git(&source, &["add", "-A"]);
        desk.git(&source, &["commit", "-q", "-m", "second"]);
        let out = desk.ramet(&[
            "fork",
            &desk.at(&source),
            &desk.at(&format!("{source}-third")),
        ]);
        assert!(
            out.status.success() && out.stderr.is_empty(),
            "{}",
            said(&out)
        );
        let paths = ["linked", "a/file1", "c/moved", "a/b/file3"].map(str::to_owned);
        desk.knows(&format!("{source}-third"), &paths);
    }
    desk.end();
}

#[test]
fn a_reset_fork_and_one_without_a_base_have_right_repositories() {
    let desk = Desk::new();
    let paths = desk.repository("source", &[]);
    desk.git("source", &["worktree", "add", "-q", "../outside"]);
    desk.write("source/.git/index.lock", "1");
    let (source, fork) = (desk.at("source"), desk.at("source-fork-1"));
    let made = desk.ramet(&["fork", &source]);
    assert!(made.status.success(), "{}", said(&made));
    let bare = desk.ramet(&["fork", "--no-base", &source, &desk.at("bare")]);
    assert!(bare.status.success(), "{}", said(&bare));
    fs::remove_file(desk.at("source/.git/index.lock")).expect("just made");
    desk.knows("bare", &paths);
    // The source goes on, and gets another name.
    desk.write("source/a/later", "1");
    fs::remove_file(desk.at("source/c/file7")).expect("is there");
    fs::rename(&source, desk.at("renamed")).expect("it is free");
    desk.write("source-fork-1/a/file1", "changed");
    desk.git("source-fork-1", &["add", "."]);
    let reset = desk.ramet(&["reset", &fork]);
    assert!(
        reset.status.success() && reset.stderr.is_empty(),
        "{}",
        said(&reset)
    );
    desk.knows("source-fork-1", &paths);
    for name in ["index.lock", "worktrees"] {
        let name = format!("source-fork-1/.git/{name}");
        assert!(!desk.exists(&name), "{name}");
    }
    desk.end();
}

#[test]
fn a_submodule_whose_index_alone_changed_its_size_keeps_no_fork() {
    let desk = Desk::new();
    desk.repository("module", &[]);
    desk.repository("outer", &[]);
    let allow = ["-c", "protocol.file.allow=always"];
    let add = ["submodule", "add", "-q", &desk.at("module"), "below"];
    desk.git("outer", &[&allow[..], &add].concat());
    desk.git("outer", &["commit", "-q", "-m", "with a module"]);
    // At another path, the cache of untracked files has another size.
    desk.git("outer/below", &["update-index", "--untracked-cache"]);
    let long = desk.at("a-name-of-another-length");
    let args = ["try", "--commit", "--own-path", "--name", &long];
    let outer = desk.at("outer");
    let script = "echo new > new";
    let out = desk.ramet(&[&args[..], &[&outer, "--", "sh", "-c", script]].concat());
    assert!(out.status.success(), "{}", said(&out));
    assert!(desk.exists("outer/new"), "{}", said(&out));
    assert!(!desk.exists("a-name-of-another-length"), "{}", said(&out));
    desk.end();
}

#[test]
fn indexes_of_submodules_and_worktrees_have_the_numbers_of_a_fork() {
    let desk = Desk::new();
    desk.repository("module", &[]);
    let paths = desk.repository("outer", &[]);
    let allow = ["-c", "protocol.file.allow=always"];
    let add = ["submodule", "add", "-q", &desk.at("module"), "below/module"];
    desk.git("outer", &[&allow[..], &add].concat());
    desk.git("outer", &["commit", "-q", "-m", "with a module"]);
    desk.git("outer", &["worktree", "add", "-q", "trees/inner"]);
    for dir in ["outer/below/module", "outer/trees/inner"] {
        for path in &paths {
            desk.touch(&format!("{dir}/{path}"), Duration::from_secs(60));
        }
        desk.git(dir, &["update-index", "--refresh"]);
    }
    let out = desk.ramet(&["fork", &desk.at("outer")]);
    assert!(
        out.status.success() && out.stderr.is_empty(),
        "{}",
        said(&out)
    );
    for dir in ["below/module", "trees/inner"] {
        let dir = format!("outer-fork-1/{dir}");
        let cached = cached_numbers(&desk, &dir);
        for path in &paths {
            let stat = fs::symlink_metadata(desk.at(&format!("{dir}/{path}"))).expect("is there");
            assert_eq!(cached.get(path), Some(&stat.ino()), "{dir}/{path}");
        }
        assert_eq!(desk.git(&dir, &["status", "--porcelain"]), "");
    }
    desk.end();
}

#[test]
fn an_index_that_is_not_known_stays_in_a_fork_and_is_told() {
    let desk = Desk::new();
    desk.repository("source", &[]);
    let index = desk.at("source/.git/index");
    let right = fs::read(&index).expect("is there");
    let mut wrong = right.clone();
    wrong[40] ^= 1;
    let mut version = right.clone();
    version[7] = 9;
    for (number, bytes) in [&wrong[..], &version, b"", &right[..50]]
        .into_iter()
        .enumerate()
    {
        fs::write(&index, bytes).expect("there is room");
        let fork = format!("fork-{number}");
        let out = desk.ramet(&["fork", &desk.at("source"), &desk.at(&fork)]);
        assert!(out.status.success(), "{}", said(&out));
        assert!(said(&out).contains("left as it is"), "{}", said(&out));
        let kept = fs::read(desk.at(&format!("{fork}/.git/index"))).expect("is there");
        assert!(kept == bytes);
    }
    desk.end();
}

#[test]
fn a_try_that_changes_nothing_of_a_repository_says_so() {
    let desk = Desk::new();
    desk.repository("source", &[]);
    let source = desk.at("source");
    for (command, told) in [
        ("true", "nothing changed"),
        ("echo 1 > new", "and 1 in .git"),
        ("git update-index --assume-unchanged file1", "and 1 in .git"),
    ] {
        let out = desk.ramet(&["try", "--discard", &source, "--", "sh", "-c", command]);
        assert!(out.status.success(), "{}", said(&out));
        assert!(said(&out).contains(told), "{command}: {}", said(&out));
    }
    // The fork stands at the path of its source.
    desk.git("source", &["update-index", "--untracked-cache"]);
    let shows = "git -c core.untrackedCache=keep status --porcelain && strings .git/index";
    for (option, path) in [
        ("--discard", source.clone()),
        ("--own-path", desk.at("own")),
    ] {
        let own = desk.at("own");
        let args = [
            "try",
            "--discard",
            option,
            "--name",
            &own,
            &source,
            "--",
            "sh",
            "-c",
            shows,
        ];
        let args: Vec<&str> = match option {
            "--own-path" => args.to_vec(),
            _ => [&args[..2], &args[3..]].concat(),
        };
        let out = desk.ramet(&args);
        assert!(out.status.success(), "{}", said(&out));
        let ident = format!("Location {path}, system Linux");
        assert!(said(&out).contains(&ident), "{option}: {}", said(&out));
    }
    desk.end();
}

/// Runs git with lines on its standard input.
fn git_with(dir: &str, args: &[&str], lines: &[String]) {
    let git = Command::new("timeout")
        .args(["60", "git", "-C", dir])
        .args(args)
        .stdin(Stdio::piped())
        .spawn();
    let mut git = git.expect("git is there");
    let mut input = git.stdin.take().expect("piped");
    for line in lines {
        writeln!(input, "{line}").expect("git reads");
    }
    drop(input);
    assert!(git.wait().expect("ends").success(), "{args:?}");
}

/// A state of an entry of the index, and of its file.
const STATES: [&str; 17] = [
    "clean",
    "clean",
    "racy",
    "racy and dirty",
    "dirty",
    "longer",
    "removed",
    "mode",
    "touched",
    "replaced",
    "renamed",
    "moved",
    "linked",
    "link",
    "skipped",
    "assumed",
    "conflict",
];

/// Brings the files of a repository into random states. The answer is lines for `update-index`: of
/// conflicts, of entries without a working tree, and of those that are taken for unchanged.
fn spoil(desk: &Desk, dir: &str, rng: &mut StdRng, paths: &[String]) -> [Vec<String>; 3] {
    let mut lines = [const { Vec::new() }; 3];
    let at = |path: &str| desk.at(&format!("{dir}/{path}"));
    let object = desk.git(dir, &["rev-parse", "HEAD:file0"]);
    for path in paths {
        let whole = at(path);
        let text = fs::read(&whole).expect("is there");
        let other = vec![b'x'; text.len()];
        match *STATES.choose(rng).expect("some") {
            "racy" | "touched" => fs::write(&whole, &text).expect("there is room"),
            "racy and dirty" => fs::write(&whole, &other).expect("there is room"),
            "dirty" => {
                fs::write(&whole, &other).expect("there is room");
                desk.touch(&format!("{dir}/{path}"), Duration::from_secs(30));
            }
            "longer" => fs::write(&whole, [&text[..], b"more"].concat()).expect("there is room"),
            "removed" => fs::remove_file(&whole).expect("is there"),
            "mode" => drop(run_ok("chmod", &["755", &whole])),
            "replaced" => {
                let new = format!("{whole}.new");
                run_ok("cp", &["-a", &whole, &new]);
                fs::rename(&new, &whole).expect("there is room");
            }
            "renamed" => fs::rename(&whole, format!("{whole}.renamed")).expect("there is room"),
            "moved" => {
                let away = at("away");
                fs::rename(&whole, &away).expect("there is room");
                if rng.random() {
                    fs::rename(&away, &whole).expect("there is room");
                }
            }
            "linked" => {
                // The name may be that of another file.
                let _ = fs::hard_link(&whole, at(&format!("c/{}", rng.random_range(0..50))));
            }
            "link" => {
                fs::remove_file(&whole).expect("is there");
                std::os::unix::fs::symlink("elsewhere", &whole).expect("there is room");
            }
            "conflict" => {
                lines[0].push(format!("0 {} 0\t{path}", "0".repeat(object.len())));
                for stage in 1..=3 {
                    lines[0].push(format!("100644 {object} {stage}\t{path}"));
                }
            }
            "skipped" => lines[1].push(path.clone()),
            "assumed" => lines[2].push(path.clone()),
            _ => {}
        }
    }
    lines
}

/// A repository whose entries have random states. The answer is the settings of its index.
fn random_repository(desk: &Desk, dir: &str, rng: &mut StdRng) -> String {
    let format = ["sha1", "sha256"][usize::from(rng.random_bool(0.3))];
    let paths = desk.repository(dir, &[&format!("--object-format={format}")]);
    let version = ["2", "3", "4"].choose(rng).expect("some");
    desk.git(dir, &["update-index", "--index-version", version]);
    let (is_split, is_cached) = (rng.random_bool(0.4), rng.random_bool(0.4));
    if is_cached {
        desk.git(dir, &["update-index", "--untracked-cache"]);
        desk.git(dir, &["status", "--porcelain"]);
    }
    if is_split {
        desk.git(dir, &["update-index", "--split-index"]);
    }
    let (first, second) = paths.split_at(paths.len() / 2);
    for some in [first, second] {
        let [conflicts, skipped, assumed] = spoil(desk, dir, rng, some);
        let whole = desk.at(dir);
        git_with(&whole, &["update-index", "--index-info"], &conflicts);
        for (flag, lines) in [
            ("--skip-worktree", skipped),
            ("--assume-unchanged", assumed),
        ] {
            git_with(&whole, &["update-index", flag, "--stdin"], &lines);
        }
        desk.write(&format!("{dir}/untracked{}", some.len()), "new");
        desk.write(&format!("{dir}/intent"), "new");
        desk.git(dir, &["add", "-N", "intent"]);
        match rng.random_range(0..4) {
            0 => drop(desk.git(dir, &["add", "a"])),
            1 => {
                // Files that do not fit are told by the exit status.
                let _ = run(
                    "timeout",
                    &["60", "git", "-C", &whole, "update-index", "-q", "--refresh"],
                );
            }
            _ => {}
        }
    }
    format!("{format} version {version} split {is_split} untracked cache {is_cached}")
}

#[test]
fn status_in_a_fork_is_that_of_a_plain_copy() {
    let mut rng = seeded("fork_git");
    let desk = Desk::new();
    let (cases, mut entries, mut known) = (number("RAMET_CASES", 8), 0, 0);
    for case in 0..cases {
        let told = random_repository(&desk, "source", &mut rng);
        let [source, copy, fork] = ["source", "copy", "fork"].map(|name| desk.at(name));
        run_ok("cp", &["-a", &source, &copy]);
        let out = desk.ramet(&["fork", &source, &fork]);
        assert!(
            out.status.success() && out.stderr.is_empty(),
            "{told}: {}",
            said(&out)
        );
        let cached = cached_numbers(&desk, "fork");
        entries += cached.len();
        let is_known = |(path, number): (&String, &u64)| {
            let stat = fs::symlink_metadata(desk.at(&format!("fork/{path}")));
            stat.is_ok_and(|stat| stat.ino() == *number)
        };
        known += cached.iter().filter(|one| is_known(*one)).count();
        let status =
            |dir: &str| desk.git(dir, &["status", "--porcelain=v2", "--untracked-files=all"]);
        let expected = status("copy");
        assert_eq!(status("fork"), expected, "case {case}: {told}");
        assert_eq!(status("fork"), expected, "case {case}: {told}, again");
        assert_eq!(
            status("source"),
            expected,
            "case {case}: {told}, the source"
        );
        desk.git("fork", &["fsck", "--strict"]);
        desk.ramet(&["drop", &fork]);
        for name in ["source", "copy"] {
            desk.mount.remove(Path::new(&desk.at(name)));
        }
    }
    println!("{cases} indexes, {entries} entries, {known} with the number of their file");
    assert!(known * 2 > entries, "{known} of {entries}");
    desk.end();
}

#[test]
fn a_fork_of_a_repository_in_use_has_the_status_of_its_moment() {
    let desk = Desk::new();
    desk.repository("source", &[]);
    let source = desk.at("source");
    let work = "n=0; while [ ! -e stop ]; do n=$((n + 1)); \
                echo $n > file$((n % 30)); echo $n > a/file$((n % 30)); mv c/file1 c/other; \
                mv c/other c/file1; mv a b; mv b a; git add -A; \
                git -c user.name=A -c user.email=a@b commit -qm $n; git status -s; done";
    let args = ["120", "sh", "-c", work];
    let worker = Command::new("timeout")
        .args(args)
        .current_dir(&source)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut worker = worker.expect("sh is there");
    for round in 0..number("RAMET_ROUNDS", 6) {
        let [fork, copy] = ["fork", "copy"].map(|name| desk.at(&format!("{name}{round}")));
        let out = desk.ramet(&["fork", &source, &fork]);
        assert!(out.status.success(), "{}", said(&out));
        // Git reads each file of the copy.
        run_ok("cp", &["-a", &fork, &copy]);
        let status = |name: &str| {
            desk.git(
                &format!("{name}{round}"),
                &["status", "--porcelain=v2", "--untracked-files=all"],
            )
        };
        let expected = status("copy");
        assert_eq!(status("fork"), expected, "round {round}");
        desk.git(&format!("fork{round}"), &["fsck", "--strict"]);
    }
    desk.write("source/stop", "");
    worker.wait().expect("it ends in time");
    desk.end();
}
