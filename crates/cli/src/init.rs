//! `ramet init`: a volume of one's own, mounted in the home directory.
//!
//! Each step is left out that was done before, so the command can be run again.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ramet_block::{Codec, MetadataCopies};
use rustix::fs::{statfs, statvfs};
use rustix::process::geteuid;

use crate::args::{Init, Mkfs, Mount};
use crate::control::Root;
use crate::failure::{self, Failure, Outcome};
use crate::home::{Home, absolute};
use crate::output::{complain, say};
use crate::size::Size;
use crate::{mkfs, mount, mounts};

/// Most room that a new volume gets.
const SIZE_MAX: u64 = 64 << 30;
/// Sizes are whole multiples of this, in bytes.
const SIZE_STEP: u64 = 1 << 20;
/// Exists where systemd is the init system (`sd_booted(3)`).
const SYSTEMD: &str = "/run/systemd/system";

pub fn run(args: &Init) -> Outcome {
    let home = Home::of_user()?;
    let is_mounted = check_dir(&home)?;
    let size = new_size(args, &home)?;
    tell_plan(args, &home, size, is_mounted)?;
    if args.dry_run {
        return Ok(());
    }
    if let Some(size) = size {
        make(&home, size)?;
    }
    if !is_mounted {
        make_dir(&home.dir, 0o755)?;
        mount::run(&Mount {
            options: Vec::new(),
            foreground: false,
            memory: None,
            log: None,
            daemon: false,
            volume: Some(home.volume.clone()),
            dir: Some(home.dir.clone()),
        })?;
    }
    let login = at_login(args, &home);
    if !geteuid().is_root() {
        say!(
            "root (sudo, docker) cannot look into {}: a mount serves its user only, unless \
             /etc/fuse.conf has 'user_allow_other' and 'ramet mount' gets '-o allow_other'",
            home.dir.display()
        )?;
    }
    login
}

/// Whether the volume is mounted already. Refuses a directory that cannot become the mount point, and
/// the mount of a daemon that was killed.
fn check_dir(home: &Home) -> Outcome<bool> {
    let dir = &home.dir;
    if let Some(found) = mounts::at(dir)? {
        if mounts::resolve(&found.volume) == mounts::resolve(&home.volume) {
            Root::open_dir(dir).map_err(|e| Failure::system(dir, e))?;
            return Ok(true);
        }
        let why = format!("{} is mounted there", found.volume.display());
        return Err(Failure::at(dir, why));
    }
    match fs::read_dir(dir) {
        Ok(mut entries) => match entries.next() {
            None => {}
            Some(_) => {
                let why = "not empty: the volume is mounted there, so move what is in it away";
                return Err(Failure::at(dir, why));
            }
        },
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::system(dir, e)),
    }
    refuse_kind(dir)?;
    Ok(false)
}

/// The size of the volume that has to be made, if there is none. An image that was left unmade counts
/// as none.
fn new_size(args: &Init, home: &Home) -> Outcome<Option<Size>> {
    let volume = &home.volume;
    match fs::metadata(volume) {
        Ok(_) if mkfs::is_left_unmade(volume)? => {}
        Ok(_) => {
            if args.size.is_some() {
                let why = "is there already: 'ramet grow --size N' makes it larger";
                return Err(Failure::at(volume, why));
            }
            return Ok(None);
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::system(volume, e)),
    }
    let below = refuse_kind(volume)?;
    if let Some(size) = args.size {
        return Ok(Some(size));
    }
    let found = statvfs(&below).map_err(|e| Failure::system(&below, e))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    Ok(Some(size_for(free)))
}

/// The size of a new volume above `free` bytes.
fn size_for(free: u64) -> Size {
    let part = SIZE_MAX.min(free / 4 * 3);
    Size::new(part / SIZE_STEP * SIZE_STEP)
}

/// Refuses a place on a file system that loses its files at a reboot, or that other machines change
/// too. Returns the directory that is there already.
fn refuse_kind(path: &Path) -> Outcome<PathBuf> {
    let mut ancestors = path.ancestors();
    let below = ancestors
        .find(|dir| dir.is_dir())
        .unwrap_or(Path::new("/"))
        .to_owned();
    let found = statfs(&below).map_err(|e| Failure::system(&below, e))?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "magic numbers have 32 bits"
    )]
    let why = refusal_of(found.f_type as u32);
    let Some(why) = why else {
        return Ok(below);
    };
    Err(Failure::at(
        path,
        format!("{why}; 'ramet mkfs' and 'ramet mount' work with a volume at any other place"),
    ))
}

/// The reason why a volume is not made on this kind of file system (statfs(2)).
fn refusal_of(magic: u32) -> Option<&'static str> {
    match magic {
        0x0102_1994 | 0x8584_58f6 => Some("is in memory (tmpfs): a reboot would lose it"),
        // NFS, SMB (three kinds), AFS (two), Ceph, 9P, Coda, Lustre.
        0x6969 | 0x517b | 0xff53_4d42 | 0xfe53_4d42 | 0x5346_414f | 0x6b41_4653 | 0x00c3_6400
        | 0x0102_1997 | 0x7375_7245 | 0x0bd0_0bd0 => {
            Some("is on a network file system: two machines could mount one volume")
        }
        _ => None,
    }
}

fn tell_plan(args: &Init, home: &Home, size: Option<Size>, is_mounted: bool) -> Outcome {
    let would = if args.dry_run { "would " } else { "" };
    let (volume, dir) = (home.volume.display(), home.dir.display());
    match size {
        Some(size) => say!(
            "{would}make {volume}: a volume of up to {size}, which takes space as files come and \
             grows by 'ramet grow'"
        )?,
        None => say!("{volume}: is there already")?,
    }
    if is_mounted {
        say!("{dir}: is mounted already")
    } else {
        say!("{would}mount it on {dir}")
    }
}

fn make(home: &Home, size: Size) -> Outcome {
    if let Some(folder) = home.volume.parent() {
        make_dir(folder, 0o700)?;
    }
    mkfs::run(&Mkfs {
        size: Some(size),
        force: false,
        dry_run: false,
        quiet: true,
        label: None,
        uuid: None,
        compression: Codec::default(),
        metadata_copies: MetadataCopies::Two,
        volume: home.volume.clone(),
    })
}

fn make_dir(dir: &Path, mode: u32) -> Outcome {
    let mut builder = fs::DirBuilder::new();
    let made = builder.recursive(true).mode(mode).create(dir);
    made.map_err(|e| Failure::system(dir, e))
}

/// Has the volume mounted at login, or tells how.
fn at_login(args: &Init, home: &Home) -> Outcome {
    let has_systemd = Path::new(SYSTEMD).exists();
    match (args.unit, has_systemd) {
        (true, true) => install_unit(home),
        (false, true) => say!("'ramet init --unit' has systemd mount it at each login"),
        (_, false) => {
            let [volume, dir] = [&home.volume, &home.dir].map(|path| in_shell(path));
            say!(
                "systemd does not run here. This line in ~/.profile mounts it at login:\n\
                 mountpoint -q {dir} || ramet mount {volume} {dir}"
            )
        }
    }
}

fn install_unit(home: &Home) -> Outcome {
    let config = absolute("XDG_CONFIG_HOME").unwrap_or_else(|| home.user.join(".config"));
    let folder = config.join("systemd/user");
    make_dir(&folder, 0o755)?;
    let path = folder.join("ramet.service");
    let program = std::env::current_exe().map_err(|e| Failure::system(Path::new("ramet"), e))?;
    if put_unit(&path, &program, home)? {
        say!("{}: mounts it at each login", path.display())?;
    } else {
        let why = "is there already, and is not as this command writes it: it stays as it is. \
                   Without it, this command writes it anew";
        complain(Failure::at(&path, why));
    }
    let enabled = enable("systemctl");
    say!("'loginctl enable-linger' mounts it at boot, and keeps it when the last session ends")?;
    enabled
}

/// Writes the unit, unless a file is there that this command has not written so. Tells whether the
/// unit is as this command writes it.
fn put_unit(path: &Path, program: &Path, home: &Home) -> Outcome<bool> {
    let failed = |e| Failure::system(path, e);
    let text = unit(&in_unit(program), home);
    match fs::read(path) {
        Ok(old) if old == text.as_bytes() => return Ok(true),
        Ok(old) if !is_of_init(&old, home) => return Ok(false),
        // The program was elsewhere then.
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    fs::write(path, text).map_err(failed)?;
    Ok(true)
}

/// Whether this command, with any path of the program, writes the bytes as the unit.
fn is_of_init(bytes: &[u8], home: &Home) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let program = text.lines().find_map(|line| {
        let call = line.strip_prefix("ExecStart=")?;
        call.strip_suffix(&mount_call(home))
    });
    program.is_some_and(|program| unit(program, home) == text)
}

/// Has systemd mount the volume at each login, by the program `systemctl`.
///
/// # Errors
/// A call failed. The others are made all the same.
fn enable(systemctl: &str) -> Outcome {
    let mut done = Ok(());
    for call in [&["daemon-reload"][..], &["enable", "ramet.service"]] {
        let mut command = Command::new(systemctl);
        command.arg("--user").args(call).stdin(Stdio::null());
        let why = match command.output() {
            Ok(out) if out.status.success() => continue,
            Ok(out) if out.stderr.is_empty() => format!("ended by {}", out.status),
            Ok(out) => String::from_utf8_lossy(&out.stderr).trim().to_owned(),
            Err(e) => failure::reason(&e),
        };
        let call = call.join(" ");
        let failed = format!("systemctl --user {call}: {why}: run it at the next login");
        if done.is_ok() {
            done = Err(Failure::new(failed));
        } else {
            complain(failed);
        }
    }
    done
}

/// The command line behind the program that mounts the volume.
fn mount_call(home: &Home) -> String {
    format!(" mount {} {}", in_unit(&home.volume), in_unit(&home.dir))
}

/// The unit of systemd, with the program as a word of a unit.
fn unit(program: &str, home: &Home) -> String {
    let (mount, dir) = (mount_call(home), in_unit(&home.dir));
    format!(
        "[Unit]\n\
         Description=Ramet volume of the user\n\
         Documentation=man:ramet(1)\n\n\
         [Service]\n\
         Type=forking\n\
         ExecStart={program}{mount}\n\
         ExecStop={program} umount {dir}\n\
         TimeoutSec=10min\n\
         KillMode=mixed\n\n\
         [Install]\n\
         WantedBy=default.target\n"
    )
}

/// A path as a word of a unit (systemd.syntax(7)).
fn in_unit(path: &Path) -> String {
    let text = path.to_string_lossy();
    let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", quoted.replace('%', "%%").replace('$', "$$"))
}

/// A path as a word of a shell.
fn in_shell(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_block::{Access, Device, FileDevice, create_image};
    use ramet_fs::{FormatOptions, UnfinishedVolume};

    use super::*;

    #[test]
    fn a_volume_leaves_room_for_others() {
        for (free, size) in [
            (1 << 40, 64 << 30),
            (40 << 30, 30 << 30),
            ((40 << 30) + 4099, 30 << 30),
            (0, 0),
        ] {
            assert_eq!(size_for(free).bytes(), size, "{free}");
        }
    }

    #[test]
    fn an_image_that_was_left_unmade_is_made_and_no_other_file_is_written_over() {
        // Memory is refused, where /tmp may be.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let home = Home {
            user: dir.path().to_owned(),
            volume: dir.path().join("image"),
            dir: dir.path().join("ramet"),
        };
        let args = |size| Init {
            size,
            unit: false,
            dry_run: false,
        };
        let wanted = || new_size(&args(Some(Size::new(64 << 20))), &home);
        let bytes = |size: Option<Size>| size.map(|size| size.bytes());
        let image = || create_image(&home.volume, 64 << 20).unwrap();
        let unmake = || fs::remove_file(&home.volume).unwrap();

        fs::write(&home.volume, "").unwrap();
        assert_eq!(bytes(wanted().unwrap()), Some(64 << 20));
        unmake();
        drop(image());
        assert_eq!(bytes(wanted().unwrap()), Some(64 << 20));
        let device: Arc<dyn Device> =
            Arc::new(FileDevice::open(&home.volume, Access::ReadWrite).unwrap());
        let begun = UnfinishedVolume::begin(&device, &FormatOptions::default()).unwrap();
        // Another process makes it.
        assert!(wanted().is_err());
        drop((begun, device));
        assert_eq!(bytes(wanted().unwrap()), Some(64 << 20));
        make(&home, wanted().unwrap().unwrap()).unwrap();
        // A volume by now.
        assert!(wanted().is_err());
        assert_eq!(bytes(new_size(&args(None), &home).unwrap()), None);
        unmake();
        image().write_at(5 << 20, b"of the user").unwrap();
        assert!(wanted().is_err());
        assert_eq!(bytes(new_size(&args(None), &home).unwrap()), None);
    }

    #[test]
    fn memory_and_networks_are_refused() {
        for magic in [0x0102_1994, 0x6969, 0xff53_4d42, 0x0102_1997] {
            assert!(refusal_of(magic).is_some(), "{magic:x}");
        }
        // ext4, XFS, btrfs, overlay.
        for magic in [0xef53, 0x5846_5342, 0x9123_683e, 0x794c_7630] {
            assert!(refusal_of(magic).is_none(), "{magic:x}");
        }
    }

    #[test]
    fn a_unit_that_the_user_wrote_stays() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("ramet.service");
        let home = Home {
            user: "/home/a".into(),
            volume: "/home/a/image".into(),
            dir: "/home/a/100% mine".into(),
        };
        let put = |program: &str| put_unit(&path, Path::new(program), &home).unwrap();
        assert!(put("/old place/ramet"));
        let first = fs::read_to_string(&path).unwrap();
        assert!(put("/usr/bin/ramet"));
        let written = fs::read_to_string(&path).unwrap();
        assert_ne!(written, first);
        assert!(put("/usr/bin/ramet"));
        for own in [
            written.replace("[Install]", "Nice=5\n\n[Install]"),
            written.replace("ramet\" mount", "ramet\" mount --log=/home/a/log"),
            written.replace("ExecStop=\"/usr", "ExecStop=\"/opt"),
            String::new(),
        ] {
            assert_ne!(own, written);
            fs::write(&path, &own).unwrap();
            assert!(!put("/usr/bin/ramet"));
            assert_eq!(fs::read_to_string(&path).unwrap(), own);
        }
    }

    #[test]
    fn a_systemctl_that_fails_is_a_failure() {
        enable("true").unwrap();
        enable("false").unwrap_err();
        enable("/no/such/program").unwrap_err();
    }

    #[test]
    fn odd_paths_stay_one_word() {
        let home = Home {
            user: "/home/a b".into(),
            volume: "/home/a b/50%/d".into(),
            dir: "/home/a b/$x\"".into(),
        };
        let text = unit(&in_unit(Path::new("/usr/bin/ramet")), &home);
        let line =
            "ExecStart=\"/usr/bin/ramet\" mount \"/home/a b/50%%/d\" \"/home/a b/$$x\\\"\"\n";
        assert!(text.contains(line), "{text}");
        assert_eq!(in_shell(Path::new("/it's")), "'/it'\\''s'");
    }
}
