//! The matrix of permissions to clone, replace and remove, beside cp and rm on ext4.
//!
//! `permissions.py` makes the calls and prints a line for each. `docs/permissions.md` tells the
//! rules by which both may differ; each other difference fails.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use ramet_e2e::{Bed, Ext4, done, ramet_bin, run_ok, text};

/// The rules of `docs/permissions.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rule {
    /// A copy keeps its owner, so only the owner makes one.
    OnlyOwnersClone,
    /// A tree is removed at once, so only its owner does it.
    OnlyOwnersRemoveTrees,
    /// The owner of a tree is not asked about the directories of others in it.
    OwnersHaveTheWholeTree,
}

/// A case and its outcome.
struct Case {
    how: String,
    object: String,
    user: String,
    dir: String,
    is_done: bool,
    /// Files of others in the copy.
    others: u32,
}

impl Case {
    fn parse(line: &str) -> Case {
        let cells: Vec<_> = line.split("; ").map(String::from).collect();
        let [how, object, user, dir, result, others] = cells.try_into().expect("six cells");
        Case {
            is_done: result == "done",
            others: others.parse().expect("a number"),
            how,
            object,
            user,
            dir,
        }
    }

    fn name(&self) -> [&str; 4] {
        [&self.how, &self.object, &self.user, &self.dir]
    }

    fn is_own(&self) -> bool {
        self.user == "owner" && !self.object.starts_with("root's")
    }

    /// The rule by which the outcome of cp and rm differs.
    fn rule(&self, of_ext4: bool) -> Option<Rule> {
        let is_tree = self.object.contains("tree");
        match (self.is_done, of_ext4) {
            (false, true) if self.how != "remove" && !self.is_own() => Some(Rule::OnlyOwnersClone),
            (false, true) if is_tree && !self.is_own() => Some(Rule::OnlyOwnersRemoveTrees),
            (true, false) if self.is_own() && self.object.contains("with root's") => {
                Some(Rule::OwnersHaveTheWholeTree)
            }
            _ => None,
        }
    }
}

fn cases(dir: &Path, command: Option<&Path>) -> Vec<Case> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/permissions.py");
    let mut python = Command::new("python3");
    let out = python.arg(script).arg(dir).args(command).output();
    let out = out.expect("./test installs python3");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let text = String::from_utf8_lossy(&out.stdout);
    text.lines().map(Case::parse).collect()
}

#[test]
fn users_clone_replace_and_remove_what_cp_and_rm_let_them_but_for_three_rules() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nobody else can be asked");
        return;
    }
    let bed = Bed::new("1G");
    let command = bed.command_for_others();
    let other = Ext4::new(&bed);
    let expected = cases(other.root(), None);
    assert!(expected.len() > 900, "{}", expected.len());
    for transport in ["no_io_uring", "io_uring"] {
        let mount = bed.mount(&["-o", transport]);
        let found = cases(mount.root(), Some(&command));
        assert_eq!(found.len(), expected.len());
        let mut rules = BTreeMap::<Rule, u32>::new();
        for (ours, theirs) in found.iter().zip(&expected) {
            let case = ours.name();
            assert_eq!(case, theirs.name());
            if ours.is_done != theirs.is_done {
                let rule = ours.rule(theirs.is_done);
                let rule = rule.unwrap_or_else(|| panic!("{case:?}: {} here", ours.is_done));
                *rules.entry(rule).or_default() += 1;
            }
            // A copy has files of others only where the source is the user's own tree.
            let may_have = ours.is_own() && ours.object.contains("with root's");
            assert!(
                ours.others == 0 || may_have,
                "{case:?}: {} files",
                ours.others
            );
        }
        println!("{transport}: {} cases, {rules:?}", found.len());
        assert_eq!(rules.len(), 3, "a rule that nothing needs is wrong");
        mount.umount();
        bed.fsck();
    }
}

/// A read-only bind mount of a directory lets the command change nothing.
#[test]
fn read_only_bind_mounts_are_not_cloned_into() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be bound");
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (dir, bound) = (mount.root().join("dir"), bed.path().join("bound"));
    std::fs::create_dir_all(dir.join("tree")).expect("root may");
    std::fs::create_dir(&bound).expect("the folder is new");
    run_ok(
        "mount",
        &["--bind".as_ref(), dir.as_os_str(), bound.as_os_str()],
    );
    run_ok(
        "mount",
        &["-o".as_ref(), "remount,bind,ro".as_ref(), bound.as_os_str()],
    );
    done(&["snapshot", "create", text(mount.root()), "before"]);
    let (tree, copy) = (bound.join("tree"), bound.join("copy"));
    let (bind, tree, copy) = (text(&bound), text(&tree), text(&copy));
    for args in [
        &["clone", tree, copy][..],
        &["rm", tree],
        &["fork", tree],
        &["snapshot", "create", bind, "more"],
        &["snapshot", "rm", bind, "before"],
        &["snapshot", "policy", bind, "hourly=3"],
        &["grow", "--size", "2G", bind],
    ] {
        let out = ramet_e2e::run(ramet_bin(), args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains("read-only"),
            "{args:?}: {said}"
        );
    }
    assert!(done(&["snapshot", "list", bind]).contains("before"));
    run_ok("umount", &[&bound]);
    mount.clone_path(&dir.join("tree"), &dir.join("copy"));
    mount.umount();
    bed.fsck();
}
