//! Volumes as mount(8), umount(8), mkfs(8) and fsck(8) see them: by a line of fstab(5) and the
//! names that these programs call.
//!
//! Everything happens in a mount namespace of its own, in which links to the command lie in
//! `/usr/sbin`, over the files there.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ramet_e2e::{Bed, run_ok};

/// `nobody`, which every Debian has.
const USER: u32 = 65534;
const NAMES: [&str; 6] = [
    "mkfs.ramet",
    "fsck.ramet",
    "mount.ramet",
    "mount.fuse.ramet",
    "umount.ramet",
    "umount.fuse.ramet",
];

/// A mount namespace, kept by a process that waits for the end of its input.
struct Machine {
    bed: Bed,
    keeper: Child,
}

impl Machine {
    /// The namespace with `names` as links to the command; nothing when the test may not make one.
    fn new(names: &[&str]) -> Option<Machine> {
        if !rustix::process::geteuid().is_root() {
            println!("not root: mount namespaces and links in /usr/sbin cannot be made");
            return None;
        }
        let bed = Bed::without_volume();
        let command = bed.command_for_others();
        let (links, work) = (bed.path().join("links"), bed.path().join("work"));
        for dir in [&links, &work] {
            fs::create_dir(dir).expect("the folder is new");
        }
        for name in names {
            symlink(&command, links.join(name)).expect("the folder is new");
        }
        let mut keeper = Command::new("unshare");
        keeper.args(["--mount", "--propagation", "private", "cat"]);
        let mut keeper = keeper
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("util-linux is installed");
        // An echo says that the namespace is there.
        let mut echo = [0; 1];
        std::io::Write::write_all(keeper.stdin.as_mut().expect("piped"), b"!").expect("it reads");
        std::io::Read::read_exact(keeper.stdout.as_mut().expect("piped"), &mut echo)
            .expect("it answers");
        let machine = Machine { bed, keeper };
        // A folder on an overlay cannot be the upper one of another.
        let upper = machine.bed.path().join("upper");
        fs::create_dir(&upper).expect("the folder is new");
        machine.ok("mount", &["-t", "tmpfs", "tmpfs", &text(&upper)]);
        machine.ok(
            "mkdir",
            &[&text(&upper.join("up")), &text(&upper.join("wk"))],
        );
        let over = format!(
            "lowerdir={}:/usr/sbin,upperdir={up}/up,workdir={up}/wk",
            text(&links),
            up = text(&upper)
        );
        machine.ok(
            "mount",
            &["-t", "overlay", "overlay", "-o", &over, "/usr/sbin"],
        );
        // The notes of libmount about mounts by ordinary users stay in here.
        machine.ok("mount", &["-t", "tmpfs", "tmpfs", "/run/mount"]);
        Some(machine)
    }

    fn run_as(&self, user: Option<u32>, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.keeper.id()));
        if let Some(user) = user {
            command.args(["setpriv", "--clear-groups"]);
            command.args([format!("--reuid={user}"), format!("--regid={user}")]);
        }
        command.arg(program).args(args);
        command
            .stdin(Stdio::null())
            .output()
            .expect("util-linux is installed")
    }

    fn status(&self, program: &str, args: &[&str]) -> (Option<i32>, String) {
        let out = self.run_as(None, program, args);
        let said = [out.stdout, out.stderr].concat();
        (
            out.status.code(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    fn ok(&self, program: &str, args: &[&str]) -> String {
        self.ok_as(None, program, args)
    }

    fn ok_as(&self, user: Option<u32>, program: &str, args: &[&str]) -> String {
        let out = self.run_as(user, program, args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.success(),
            "{program} {args:?}: {}: {said}",
            out.status
        );
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Kills the daemon of the mount at `at`, which is of that user.
    fn kill_daemon(&self, user: Option<u32>, ramet: &str, at: &str) {
        let said = self.ok_as(user, ramet, &["stat", "--json", at]);
        let stat: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let pid = stat["pid"].as_i64().expect("the daemon's pid");
        let pid = rustix::process::Pid::from_raw(pid.try_into().expect("a pid"));
        ramet_e2e::kill_and_wait(pid.expect("not zero"));
    }

    /// Type and options of the mount at `dir`.
    fn shown(&self, dir: &Path) -> String {
        self.ok("findmnt", &["-n", "-o", "FSTYPE,OPTIONS", &text(dir)])
    }

    fn is_mounted(&self, dir: &Path) -> bool {
        self.run_as(None, "findmnt", &["--mountpoint", &text(dir)])
            .status
            .success()
    }

    /// A new volume in the folder.
    fn volume(&self, name: &str) -> PathBuf {
        let volume = self.bed.path().join(name);
        run_ok(
            ramet_e2e::ramet_bin(),
            &["mkfs", "--size", "64M", &text(&volume)],
        );
        volume
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let dir = text(&self.bed.mount_point());
        while self.is_mounted(&self.bed.mount_point()) {
            if !self
                .run_as(None, "umount", &["-i", "-l", &dir])
                .status
                .success()
            {
                break;
            }
        }
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("temporary paths are UTF-8").to_owned()
}

#[test]
fn a_line_of_fstab_is_mounted_by_root() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let fstab = machine.bed.path().join("fstab");
    let line = |kind: &str, options: &str| {
        let line = format!("{} {} {kind} {options} 0 2\n", text(&volume), text(&dir));
        fs::write(&fstab, line).expect("ours");
    };
    let fstab = text(&fstab);
    for kind in ["ramet", "fuse.ramet"] {
        line(
            kind,
            "noatime,nosuid,cache_size=64M,nofail,x-systemd.requires=/",
        );
        machine.ok("mount", &["-a", "-T", &fstab]);
        let shown = machine.shown(&dir);
        assert!(shown.starts_with("fuse.ramet "), "{shown}");
        assert!(
            shown.contains("nosuid") && !shown.contains("nodev"),
            "{shown}"
        );
        machine.ok("touch", &[&text(&dir.join(kind))]);
        // All that is mounted already is left alone.
        machine.ok("mount", &["-a", "-T", &fstab]);
        machine.ok("umount", &[&text(&dir)]);
        // umount(8) has waited for the daemon, which has closed the volume.
        let said = machine.ok("fsck.ramet", &["-a", &text(&volume)]);
        assert!(said.contains(": clean"), "{said}");
    }
    // libmount notes nothing of such a line by itself.
    line("ramet", "fsname=other");
    machine.ok("mount", &["-a", "-T", &fstab]);
    machine.ok("touch", &[&text(&dir.join("file"))]);
    machine.ok("umount", &[&text(&dir)]);
    let said = machine.ok("fsck.ramet", &["-a", &text(&volume)]);
    assert!(said.contains(": clean"), "{said}");
    line("ramet", "ro,noauto");
    machine.ok("mount", &["-a", "-T", &fstab]);
    assert!(!machine.is_mounted(&dir), "noauto was mounted");
    machine.ok("mount", &["-T", &fstab, &text(&dir)]);
    let (status, said) = machine.status("touch", &[&text(&dir.join("file"))]);
    assert!(status != Some(0) && said.contains("Read-only"), "{said}");
    machine.ok("umount", &[&text(&volume)]);
    assert!(!machine.is_mounted(&dir));
}

#[test]
fn an_ordinary_user_mounts_and_unmounts_a_line_of_fstab_that_says_user() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let dir = machine.bed.mount_point();
    let volume = machine.bed.path().join("volume.ramet");
    machine.bed.hand_to(USER, USER);
    let as_user = |program: &str, args: &[&str]| machine.ok_as(Some(USER), program, args);
    as_user("mkfs", &["-t", "ramet", "--size", "64M", &text(&volume)]);
    let fstab = machine.bed.path().join("fstab");
    let line = |options: &str| {
        let line = format!("{} {} ramet {options} 0 0\n", text(&volume), text(&dir));
        fs::write(&fstab, line).expect("ours");
    };
    line("user,noauto");
    fs::set_permissions(&fstab, PermissionsExt::from_mode(0o644)).expect("ours");
    machine.ok("mount", &["--bind", &text(&fstab), "/etc/fstab"]);

    as_user("mount", &[&text(&dir)]);
    let shown = machine.shown(&dir);
    for option in ["fuse.ramet", "noexec", "nosuid", "nodev", "user_id=65534"] {
        assert!(shown.contains(option), "no {option}: {shown}");
    }
    as_user("mkdir", &[&text(&dir.join("d"))]);
    as_user("umount", &[&text(&dir)]);
    assert!(!machine.is_mounted(&dir));
    line("user");
    as_user("mount", &["-a"]);
    assert!(machine.is_mounted(&dir));
    as_user("ls", &[&text(&dir.join("d"))]);
    as_user("umount", &[&text(&dir)]);
    let said = as_user(
        &text(&machine.bed.path().join("ramet")),
        &["stat", &text(&volume)],
    );
    assert!(said.contains("allocated"), "{said}");
}

#[test]
fn a_mount_is_made_read_only_by_remount_and_writable_again() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let at = text(&dir);
    machine.ok("mount", &["-t", "ramet", &text(&volume), &at]);
    let touch = || machine.status("touch", &[&text(&dir.join("file"))]).0;
    assert_eq!(touch(), Some(0));
    machine.ok("mount", &["-o", "remount,ro", &at]);
    assert_eq!(touch(), Some(1));
    machine.ok("mount", &["-o", "remount,rw,nosuid", &at]);
    assert_eq!(touch(), Some(0));
    assert!(machine.shown(&dir).contains("nosuid"));
    // Options of the daemon stay as they are; an unknown one is told.
    machine.ok("mount", &["-o", "remount,noatime,memory=1G,x-any", &at]);
    let (status, said) = machine.status("mount", &["-o", "remount,data=ordered", &at]);
    assert!(
        status != Some(0) && said.contains("data=ordered"),
        "{status:?}: {said}"
    );
    machine.ok("umount", &[&at]);
}

/// The options of `docs/mount-options.md`, with kind, ordinary user and effect of each.
fn table_of_options() -> Vec<[String; 4]> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/mount-options.md");
    let text = fs::read_to_string(path).expect("it is there");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    let rows = rows.map(|row| {
        let cells: Vec<_> = row
            .trim_end_matches(" |")
            .split(" | ")
            .map(String::from)
            .collect();
        <[String; 4]>::try_from(cells).expect("a row has four cells")
    });
    let each = rows.flat_map(|[names, kind, user, effect]| {
        let names: Vec<_> = names
            .trim_end_matches('`')
            .split("`, `")
            .map(String::from)
            .collect();
        let row = move |name| [name, kind.clone(), user.clone(), effect.clone()];
        names.into_iter().map(row).collect::<Vec<_>>()
    });
    each.collect()
}

/// Each option of the table is honoured, or refused with the reason that the table tells.
#[test]
fn every_option_of_the_table_mounts_or_says_why_not() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let log = machine.bed.path().join("daemon.log");
    fs::write(&log, "").expect("ours");
    for path in [&volume, &log] {
        fs::set_permissions(path, PermissionsExt::from_mode(0o666)).expect("ours");
    }
    let ramet = text(&machine.bed.path().join("ramet"));
    // The table has an option that shows it.
    machine.ok(&ramet, &["mount", &text(&volume), &text(&dir)]);
    machine.ok(&ramet, &["snapshot", "create", &text(&dir), "one"]);
    machine.ok(&ramet, &["umount", &text(&dir)]);
    let table = table_of_options();
    assert!(table.len() > 80, "{}", table.len());
    for user in [None, Some(USER)] {
        if user.is_some() {
            machine.bed.hand_to(USER, USER);
            for path in [&volume, &log] {
                std::os::unix::fs::chown(path, Some(USER), Some(USER)).expect("root may");
            }
        }
        for [name, kind, for_users, effect] in &table {
            let option = match name.split_once('=') {
                Some((name, "CODEC")) => format!("{name}=lz4"),
                Some((name, "FILE")) => format!("{name}={}", text(&log)),
                Some((name, "LABEL")) => format!("{name}=\"system_u:object_r:tmp_t:s0:c1,c2\""),
                Some((name, "N")) => format!("{name}=3"),
                Some((name, "NAME")) if name == "snapshot" => format!("{name}=one"),
                _ => name.clone(),
            };
            let option = match &option[..] {
                "recovery" | "snapshot=one" => format!("ro,{option}"),
                _ => option,
            };
            let options = &option[..];
            let args = ["mount", &text(&volume), &text(&dir), "-o", options];
            let out = machine.run_as(user, &ramet, &args);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            let is_mounted = machine.is_mounted(&dir);
            assert_eq!(out.status.success(), is_mounted, "{option}: {said}");
            let may_be_refused = user.is_some() && for_users.starts_with("if");
            match kind.as_str() {
                "refused" => {
                    let why = effect.split(". ").next().expect("a first sentence");
                    assert!(!is_mounted && said.contains(why), "{option}: {said}");
                }
                _ if may_be_refused && !is_mounted => {
                    assert!(said.contains("fusermount3"), "{option}: {said}");
                }
                _ => assert!(is_mounted, "{option}, {user:?}: {said}"),
            }
            if is_mounted {
                let args = ["umount", &text(&dir)];
                let out = machine.run_as(user, &ramet, &args);
                let said = String::from_utf8_lossy(&out.stderr);
                assert!(out.status.success(), "{option}: {said}");
            }
        }
    }
}

#[test]
fn a_mount_without_links_follows_none() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let at = text(&dir);
    machine.ok(
        "mount",
        &["-t", "ramet", "-o", "nosymfollow", &text(&volume), &at],
    );
    let link = text(&dir.join("link"));
    machine.ok("touch", &[&text(&dir.join("file"))]);
    machine.ok("ln", &["-s", "file", &link]);
    let (status, said) = machine.status("cat", &[&link]);
    assert!(
        status == Some(1) && said.contains("symbolic links"),
        "{said}"
    );
    assert_eq!(machine.ok("readlink", &[&link]).trim(), "file");
    assert!(machine.shown(&dir).contains("nosymfollow"));
    machine.ok("umount", &[&at]);
}

/// The table of libmount has a line for each mount that umount(8) is to wait for.
#[test]
fn an_unmount_by_any_name_leaves_no_line_in_the_table_of_libmount() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (
        machine.volume("volume.ramet"),
        machine.bed.path().join("a #b"),
    );
    fs::create_dir(&dir).expect("the folder is new");
    let ramet = text(&machine.bed.path().join("ramet"));
    let at = text(&dir);
    let table = || machine.ok("cat", &["/run/mount/utab"]);
    for unmount in [
        [&ramet[..], "umount"],
        ["env", "umount"],
        ["env", "umount.ramet"],
    ] {
        machine.ok("mount", &["-t", "ramet", &text(&volume), &at]);
        assert!(table().contains("uhelper=ramet"), "{}", table());
        // A mount that is in use keeps its line.
        let held = ["-c", "cd \"$0\" && ! \"$1\" umount \"$0\"", &at, &ramet];
        machine.ok("bash", &held);
        assert!(table().contains("uhelper=ramet"), "{}", table());
        machine.ok(unmount[0], &[unmount[1], &at]);
        assert!(!machine.is_mounted(&dir));
        assert_eq!(table(), "", "{unmount:?}");
    }
    // Of a daemon that was killed, too.
    machine.ok("mount", &["-t", "ramet", &text(&volume), &at]);
    machine.kill_daemon(None, &ramet, &at);
    machine.ok(&ramet, &["umount", &at]);
    assert_eq!(table(), "", "of a dead mount");
}

/// A daemon that is killed leaves no mount, for root and for an ordinary user.
#[test]
fn a_mount_that_unmounts_itself_goes_with_its_daemon() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let ramet = text(&machine.bed.path().join("ramet"));
    let at = text(&dir);
    for user in [None, Some(USER)] {
        if user.is_some() {
            machine.bed.hand_to(USER, USER);
            std::os::unix::fs::chown(&volume, Some(USER), Some(USER)).expect("root may");
        }
        let args = ["mount", &text(&volume), &at, "-o", "auto_unmount,noatime"];
        machine.ok_as(user, &ramet, &args);
        machine.ok_as(user, "ls", &[&at]);
        machine.kill_daemon(user, &ramet, &at);
        let began = std::time::Instant::now();
        while machine.is_mounted(&dir) {
            assert!(began.elapsed().as_secs() < 30, "the mount stays");
            std::thread::yield_now();
        }
        // The next mount is left alone when its daemon ends in order.
        machine.ok_as(user, &ramet, &args);
        machine.ok_as(user, &ramet, &["umount", &at]);
        assert!(!machine.is_mounted(&dir));
    }
}

#[test]
fn requests_that_mount_nothing_say_so_by_their_status() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let (volume, at) = (text(&volume), text(&dir));
    machine.ok("mount", &["-f", "-v", "-t", "ramet", &volume, &at]);
    assert!(!machine.is_mounted(&dir), "-f mounts nothing");
    let helper = |args: &[&str]| machine.status("mount.ramet", args);
    let (status, said) = helper(&[&volume, &at, "-o", "data=ordered"]);
    assert!(status == Some(1) && said.contains("data=ordered"), "{said}");
    let (status, said) = helper(&[&volume]);
    assert!(
        status == Some(1) && said.contains("Usage: mount.ramet"),
        "{said}"
    );
    let (status, said) = helper(&["/nowhere/volume", &at]);
    assert!(
        status == Some(32) && said.starts_with("mount.ramet: /nowhere"),
        "{said}"
    );
    // mount(8) repeats the words of its helper.
    let (status, said) = machine.status("mount", &["-t", "ramet", "/nowhere/volume", &at]);
    assert!(status == Some(32) && said.contains("/nowhere"), "{said}");
    machine.ok(
        "mount.ramet",
        &["-s", &volume, &at, "-o", "ro,data=ordered"],
    );
    assert!(machine.is_mounted(&dir), "-s ignores what is not known");
    let (status, said) = machine.status("umount.ramet", &["/nowhere"]);
    assert!(
        status == Some(32) && said.contains("not a Ramet mount"),
        "{said}"
    );
    machine.ok("umount", &["-l", &at]);
    assert!(!machine.is_mounted(&dir));
}

#[test]
fn mount_fuse_finds_the_command_without_a_helper_of_ours() {
    let Some(machine) = Machine::new(&["ramet"]) else {
        return;
    };
    let (volume, dir) = (machine.volume("volume.ramet"), machine.bed.mount_point());
    let (volume, at) = (text(&volume), text(&dir));
    machine.ok(
        "mount",
        &["-t", "fuse.ramet", "-o", "noatime", &volume, &at],
    );
    let shown = machine.shown(&dir);
    assert!(
        shown.starts_with("fuse.ramet ") && !shown.contains("nodev"),
        "{shown}"
    );
    machine.ok("umount", &[&at]);
}

#[test]
fn mkfs_and_fsck_call_ours_by_the_type() {
    let Some(machine) = Machine::new(&NAMES) else {
        return;
    };
    let (volume, dir) = (
        machine.bed.path().join("new.ramet"),
        machine.bed.mount_point(),
    );
    let (at, path) = (text(&dir), text(&volume));
    let said = machine.ok("mkfs", &["-t", "ramet", "-n", "--size", "64M", &path]);
    assert!(said.contains("would be a volume of 64.0 MiB"), "{said}");
    assert!(!volume.exists(), "-n makes nothing");
    let said = machine.ok("mkfs", &["-t", "ramet", "-q", "--size", "64M", &path]);
    assert!(said.is_empty() && volume.exists(), "{said}");
    let (status, said) = machine.status("mkfs", &["-t", "ramet", &path]);
    assert!(
        status == Some(1) && said.starts_with("mkfs.ramet: "),
        "{said}"
    );
    assert_eq!(machine.status("mkfs.ramet", &["--no-such"]).0, Some(1));

    let fsck = |args: &[&str]| {
        let args = [&["-T", "-t", "ramet"], args, &[&path]].concat();
        machine.status("fsck", &args)
    };
    let (status, said) = fsck(&["-a"]);
    assert!(status == Some(0) && said.contains(": clean"), "{said}");
    let (status, said) = fsck(&["-p", "-f"]);
    assert!(
        status == Some(0) && said.contains("nodes checked"),
        "{said}"
    );
    let (status, said) = fsck(&["-n"]);
    assert!(
        status == Some(0) && said.contains("nodes checked"),
        "{said}"
    );
    assert_eq!(
        machine.status("fsck.ramet", &["-y", "-n", &path]).0,
        Some(16)
    );
    assert_eq!(machine.status("fsck.ramet", &["-a", "/nowhere"]).0, Some(8));

    machine.ok("mount", &["-t", "ramet", &path, &at]);
    let (status, said) = fsck(&["-a"]);
    assert!(status == Some(8) && said.contains("mounted on"), "{said}");
    assert_eq!(
        machine.status("fsck.ramet", &["-M", "-y", &path]).0,
        Some(0)
    );
    machine.ok("touch", &[&text(&dir.join("file"))]);
    machine.ok("sync", &[&at]);
    let stat = machine.ok("mkfs.ramet", &["--version"]);
    assert!(stat.starts_with("mkfs.ramet "), "{stat}");
    // As after a crash: a copy of the device while the volume is mounted.
    let crashed = text(&machine.bed.path().join("crashed.ramet"));
    machine.ok("cp", &["--sparse=always", &path, &crashed]);
    let (status, said) = machine.status("fsck.ramet", &["-a", &crashed]);
    assert!(status == Some(0) && said.contains("recovered"), "{said}");
    let (status, said) = machine.status("fsck.ramet", &["-a", &crashed]);
    assert!(status == Some(0) && said.contains(": clean"), "{said}");
    machine.ok("umount", &[&at]);
}
