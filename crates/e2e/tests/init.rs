//! `ramet init` as a new user without root meets it.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use ramet_e2e::Bed;

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

/// A user with a home directory of their own and the command.
struct User {
    bin: PathBuf,
    home: PathBuf,
    /// Whether tests run as root, and so this is another user.
    is_other: bool,
    _bed: Bed,
}

impl User {
    fn new() -> User {
        let bed = Bed::without_volume();
        let bin = bed.command_for_others();
        let home = bed.path().join("home of a user");
        std::fs::create_dir(&home).expect("the folder is new");
        let is_other = rustix::process::geteuid().is_root();
        if is_other {
            chown(&home, Some(USER), Some(USER)).expect("tests run as root");
        }
        User {
            bin,
            home,
            is_other,
            _bed: bed,
        }
    }

    /// Runs the command in this environment; returns whether it succeeded, and all that it said.
    fn ramet(&self, args: &[&str], environment: &[(&str, &str)]) -> (bool, String) {
        let mut command = Command::new(&self.bin);
        command.args(args).current_dir(&self.home);
        command.env_remove("XDG_DATA_HOME").env("HOME", &self.home);
        command.envs(environment.iter().copied());
        if self.is_other {
            command.uid(USER).gid(USER);
        }
        let out = command.output().expect("the command runs");
        let text = [out.stdout, out.stderr].concat();
        (
            out.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    fn must(&self, args: &[&str]) -> String {
        let (ok, said) = self.ramet(args, &[]);
        assert!(ok, "{args:?}: {said}");
        said
    }

    fn refused(&self, args: &[&str], environment: &[(&str, &str)], why: &str) {
        let (ok, said) = self.ramet(args, environment);
        assert!(!ok && said.contains(why), "{args:?}: {said}");
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // A test that failed leaves no mount.
        self.ramet(&["umount"], &[]);
    }
}

#[test]
fn a_user_has_a_volume_by_one_command() {
    let user = User::new();
    let (dir, image) = (
        user.home.join("ramet"),
        user.home.join(".local/share/ramet/default.ramet"),
    );
    for verb in [
        "mount", "umount", "fsck", "stat", "sync", "du", "scrub", "grow", "forks",
    ] {
        user.refused(&[verb], &[], "no volume of your own yet: 'ramet init'");
    }
    let none = "no volume of your own yet";
    user.refused(&["fsck", "--json"], &[], none);
    user.refused(&["snapshot", "create", "one"], &[], none);
    user.refused(&["snapshot", "create"], &[], "[DIR] <NAME>");
    user.refused(&["snapshot", "create", "a", "b", "c"], &[], "'c'");
    let said = user.must(&["init", "--size", "1G", "--dry-run"]);
    assert!(
        said.contains("would make") && said.contains("1.0 GiB"),
        "{said}"
    );
    assert!(!dir.exists() && !image.exists());

    let said = user.must(&["init", "--size", "1G"]);
    assert!(said.contains("grow"), "{said}");
    assert_eq!(said.contains("user_allow_other"), user.is_other, "{said}");
    let mode = image.metadata().expect("it was made").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // Commands without a volume or a directory mean this one.
    for verb in ["stat", "sync", "du", "init", "forks"] {
        user.must(&[verb]);
    }
    user.must(&["snapshot", "create", "one"]);
    assert!(user.must(&["snapshot", "list"]).contains("one"));
    user.must(&["snapshot", "policy", "hourly=2"]);
    assert_eq!(user.must(&["snapshot", "policy"]).trim(), "hourly=2");
    user.refused(&["snapshot", "rm", "one"], &[], "not on a Ramet mount");
    user.must(&["umount"]);
    assert!(user.must(&["fsck"]).contains("clean"));
    user.must(&["mount"]);
    user.must(&["umount"]);
    user.refused(&["init", "--size", "2G"], &[], "grow");
    user.must(&["grow", "--size", "2G", image.to_str().expect("UTF-8")]);
    user.must(&["init"]);
    assert!(user.must(&["stat"]).contains("2.0 GiB"));
}

#[test]
fn a_project_comes_into_the_own_volume() {
    let user = User::new();
    std::fs::create_dir(user.home.join("project")).expect("the folder is new");
    std::fs::write(user.home.join("project/file"), "of the user").expect("there is room");
    user.refused(&["import", "project"], &[], "'ramet init' makes one");
    user.must(&["init", "--size", "1G"]);
    user.must(&["import", "project"]);
    user.refused(&["import", "project"], &[], "exists");
    user.must(&["fork", "ramet/project"]);
    let said = user.must(&["diff", "ramet/project", "ramet/project-fork-1"]);
    assert_eq!(said, "");
    user.refused(&["import", "-"], &[], "no name of its own");
}

#[test]
fn places_that_lose_files_are_refused() {
    let user = User::new();
    user.refused(&["init"], &[("HOME", "")], "HOME");
    user.refused(&["init"], &[("XDG_DATA_HOME", "/dev/shm/data")], "tmpfs");
    let dir = user.home.join("ramet");
    std::fs::create_dir(&dir).expect("the folder is new");
    std::fs::write(dir.join("file"), "of the user").expect("there is room");
    user.refused(&["init"], &[], "not empty");
    assert!(!user.home.join(".local").exists());
    std::fs::remove_dir_all(&dir).expect("ours");
    std::fs::write(&dir, "a file").expect("there is room");
    user.refused(&["init"], &[], "not a directory");
}
