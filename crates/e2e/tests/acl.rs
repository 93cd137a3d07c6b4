//! Access control lists are as on ext4: the same calls, by several users, in a directory of each.
//!
//! `acl.py` makes the calls and prints a line for each. `RAMET_ACL_STEP=1` tries all of them.

use std::path::Path;
use std::process::Command;

use ramet_e2e::{Bed, Ext4, number, seeded};
use rand::Rng;

/// The cases of this part of all are tried.
const STEP: u64 = 8;
/// Lines that all cases print at least.
const LINES_MIN: u64 = 5000;

fn lines(dir: &Path, step: u64, first: u64) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/acl.py");
    let out = Command::new("python3")
        .arg(script)
        .arg(dir)
        .args([step.to_string(), first.to_string()])
        .output()
        .expect("./test installs python3");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    text.lines().map(String::from).collect()
}

#[test]
fn lists_and_modes_are_as_on_ext4() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nobody else can be asked");
        return;
    }
    let step = number("RAMET_ACL_STEP", STEP);
    let first = seeded("acl").random_range(0..step);
    let bed = Bed::new("1G");
    // Other users open the files below.
    bed.command_for_others();
    let other = Ext4::new(&bed);
    let mount = bed.mount(&[]);
    let ours = mount.root().join("dir");
    std::fs::create_dir(&ours).expect("root may");
    let expected = lines(other.root(), step, first);
    drop(other);
    let found = lines(&ours, step, first);
    assert!(
        expected.len() as u64 >= LINES_MIN / step,
        "{}",
        expected.len()
    );
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected, "ext4 is on the right");
    }
    println!("{} lines are those of ext4", found.len());
    std::fs::remove_dir(&ours).expect("it is empty");
    mount.umount();
    bed.fsck();
}

/// `cp -a` and `tar` keep lists, and a clone has them, also where its directory has lists for new
/// entries.
#[test]
fn copies_and_clones_have_the_lists_of_their_source() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let script = "set -e; mkdir src; echo text > src/file; mkdir src/sub
         setfacl -m u:daemon:rwx,g:mail:r-x,d:u:bin:r-- src
         setfacl -m u:daemon:rw- src/file
         setfacl -d -m g:mail:rwx src/sub
         cp -a src copied; tar --acls -cf t.tar src; mkdir out; tar --acls -xf t.tar -C out
         mkdir in; setfacl -d -m u:games:rwx in";
    let sh = |script: &str| {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script]).current_dir(mount.root());
        let out = shell.output().expect("sh runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{script}: {said}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    sh(script);
    let source = mount.root().join("src");
    mount.clone_path(&source, &mount.root().join("in/cloned"));
    let listed = |dir: &str| sh(&format!("cd {dir}; getfacl -nR ."));
    let expected = listed("src");
    assert!(expected.contains("user:1:rwx"), "{expected}");
    for copy in ["copied", "out/src", "in/cloned"] {
        assert_eq!(listed(copy), expected, "{copy}");
    }
    // A file without a list has none, rather than no support for lists.
    let none = "touch plain; getfattr -n system.posix_acl_access plain 2>&1 || true";
    assert!(sh(none).contains("No such attribute"), "{}", sh(none));
    mount.umount();
    bed.fsck();
}
