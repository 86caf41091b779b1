//! Guests: booted, watched, and told apart by how they ended.
//!
//! A guest that came up says so with a file that holds this run's number, and its script's exit status is in another.
//! So a guest that never ran cannot pass for one that did. A boot that failed is tried again; a script that failed
//! is not.

use core::fmt::Write as _;
use core::time::Duration;
use std::env;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, id};
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use super::cable::{Cable, NETDEV};
use super::image::Image;
use crate::workspace::Workspace;

/// What guests run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script<'s> {
    /// Also the name of its folder.
    pub(crate) name: &'s str,
    /// Shell, after `guest/lib.sh`.
    pub(crate) text: &'s str,
    /// One guest, or two on one wire.
    pub(crate) guests: usize,
    /// What it may take, from the first line of the script.
    pub(crate) limit: Duration,
}

/// Runs a script in its guests, with these variables set; the folder with what it left.
///
/// # Errors
/// A guest that did not boot, [`ATTEMPTS`] times; a script that failed or did not end; a kernel that reported a bug.
pub(crate) fn run(
    workspace: &Workspace,
    image: &Image,
    script: &Script<'_>,
    variables: &[(&str, PathBuf)],
) -> Result<PathBuf> {
    let folder = workspace.target("kernel").join("cases").join(script.name);
    for attempt in 1..=ATTEMPTS {
        let run = Run::new(&folder, script, variables, attempt)?;
        let ends = run.boot(image)?;
        let ends: Vec<(char, &End)> = run.guests().zip(&ends).collect();
        if let Some((guest, _)) = ends.iter().find(|(_, end)| matches!(end, End::NoBoot)) {
            eprintln!(
                "{}: guest {guest} did not boot, attempt {attempt} of {ATTEMPTS}{}",
                script.name,
                run.quote(*guest, "console")
            );
            continue;
        }
        for (guest, end) in &ends {
            run.judge(*guest, end)?;
        }
        return Ok(folder);
    }
    bail!("no guest was run: {ATTEMPTS} boots failed");
}

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its script did not begin.
    NoBoot,
    /// Its script began and has no exit status: the guest is dead, or was killed at the limit.
    NoStatus,
    /// The exit status of its script.
    Exit(i32),
}

/// One attempt.
struct Run<'s> {
    folder: &'s Path,
    script: &'s Script<'s>,
    /// What its guests have to say, so that no other run's answer is taken for theirs.
    number: String,
}

impl<'s> Run<'s> {
    fn new(
        folder: &'s Path,
        script: &'s Script<'s>,
        variables: &[(&str, PathBuf)],
        attempt: u32,
    ) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
        fs::create_dir_all(folder)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let number = format!("{}-{}-{attempt}", now.as_millis(), id());
        fs::write(
            folder.join("script.sh"),
            format!("{LIBRARY}\n{}", script.text),
        )?;
        let run = Self {
            folder,
            script,
            number,
        };
        for guest in run.guests() {
            let path = run.file(guest, "sh");
            fs::write(&path, run.wrapper(guest, variables)?)?;
            make_executable(&path)?;
        }
        Ok(run)
    }

    fn guests(&self) -> impl Iterator<Item = char> + use<> {
        ('a'..='z').take(self.script.guests)
    }

    fn file(&self, guest: char, what: &str) -> PathBuf {
        self.folder.join(format!("{guest}.{what}"))
    }

    /// The guest's first program. The output of a guest is lost unless it goes to a file.
    fn wrapper(&self, guest: char, variables: &[(&str, PathBuf)]) -> Result<String> {
        let folder = self.folder.display();
        let number = &self.number;
        let mut text = format!("#!/bin/bash\nexport GUEST={guest} DIR='{folder}'\n");
        for (name, value) in variables {
            writeln!(text, "export {name}='{}'", value.display())?;
        }
        write!(
            text,
            "exec >\"$DIR/$GUEST.output\" 2>&1\n\
             export PATH=\"$PATH:/usr/sbin:/sbin\"\n\
             echo {number} >\"$DIR/$GUEST.started\"\n\
             timeout --kill-after=5 {} bash -eu -o pipefail \"$DIR/script.sh\"\n\
             status=$?\n\
             dmesg >\"$DIR/$GUEST.dmesg\"\n\
             echo {number} $status >\"$DIR/$GUEST.status\"\n",
            self.script.limit.as_secs()
        )?;
        Ok(text)
    }

    /// Boots all guests, and waits for their ends.
    fn boot(&self, image: &Image) -> Result<Vec<End>> {
        // A socket's path has at most 107 bytes, so it is not in the folder.
        let wire = env::temp_dir().join(format!("wire-{}", self.number));
        let mut children = Vec::new();
        let mut cables = Vec::new();
        for guest in self.guests() {
            if guest != 'a' {
                // Only who has a listener can be dialed.
                await_file(&wire);
            }
            let monitor = env::temp_dir().join(format!("monitor-{}-{guest}", self.number));
            let spawned = self.spawn(image, guest, &wire, &monitor);
            cables.push(Cable::new(self.folder, guest, monitor));
            match spawned {
                Ok(child) => children.push(child),
                Err(error) => {
                    children.iter_mut().for_each(kill);
                    return Err(error);
                }
            }
        }
        let start = Instant::now();
        let mut all_started = None;
        let mut complaints: Vec<String> = Vec::new();
        let ended = loop {
            let mut running = false;
            for child in &mut children {
                running |= child.try_wait()?.is_none();
            }
            if !running {
                break true;
            }
            if all_started.is_none() && self.guests().all(|guest| self.started(guest)) {
                if self.guests().any(|guest| self.has_wrong_clock(guest)) {
                    break false;
                }
                all_started = Some(Instant::now());
            }
            let late = match all_started {
                Some(since) => since.elapsed() > self.script.limit + SHUTDOWN,
                None => start.elapsed() > BOOT,
            };
            if late {
                break false;
            }
            for cable in &mut cables {
                // The guest waits for it, and tells when it waits in vain. Each failure is said once.
                if let Err(error) = cable.look() {
                    let text = format!("{error:#}");
                    if !complaints.contains(&text) {
                        eprintln!("{}: {text}", self.script.name);
                        complaints.push(text);
                    }
                }
            }
            thread::sleep(Duration::from_millis(50));
        };
        if !ended {
            children.iter_mut().for_each(kill);
        }
        let _ = fs::remove_file(&wire);
        Ok(self.guests().map(|guest| self.end(guest)).collect())
    }

    fn spawn(&self, image: &Image, guest: char, wire: &Path, monitor: &Path) -> Result<Child> {
        let console = File::create(self.file(guest, "console"))?;
        let mut command = image.vng();
        command.arg("--run").arg(&image.vmlinuz);
        command.args([
            "--disable-kvm",
            "--verbose",
            "--cpus",
            CPUS,
            "--memory",
            "1G",
            // So that user space reads the time without a system call: without it Linux trusts no emulated counter.
            "--append=tsc=reliable",
            "--append=clocksource=tsc",
            // A guest that gets too little of a busy host's time fails this check and panics.
            "--append=no_timer_check",
        ]);
        command.arg(format!("--rwdir={}", self.folder.display()));
        command.arg("--exec").arg(self.file(guest, "sh"));
        if self.script.guests > 1 {
            let monitor = Cable::options(monitor);
            command.arg(format!("--qemu-opts={} {monitor}", card(guest, wire)));
        }
        command
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            // vng, a shell, virtme-run and QEMU end together.
            .process_group(0)
            .spawn()
            .context("cannot start vng")
    }

    fn started(&self, guest: char) -> bool {
        fs::read_to_string(self.file(guest, "started"))
            .is_ok_and(|number| number.trim() == self.number)
    }

    /// The kernel found two frequencies of its counter, as it does where the host is too busy while it looks. Its time would
    /// run too fast or too slow, and every limit with it.
    fn has_wrong_clock(&self, guest: char) -> bool {
        fs::read(self.file(guest, "console")).is_ok_and(|console| {
            String::from_utf8_lossy(&console).contains("PIT calibration deviates from HPET")
        })
    }

    fn end(&self, guest: char) -> End {
        if !self.started(guest) || self.has_wrong_clock(guest) {
            return End::NoBoot;
        }
        let said = fs::read_to_string(self.file(guest, "status")).unwrap_or_default();
        match said.trim().split_once(' ') {
            Some((number, status)) if number == self.number => {
                status.parse().map_or(End::NoStatus, End::Exit)
            }
            _ => End::NoStatus,
        }
    }

    fn judge(&self, guest: char, end: &End) -> Result<()> {
        let bugs = fs::read_to_string(self.file(guest, "dmesg")).unwrap_or_default();
        match end {
            End::Exit(0) => match bug(&bugs) {
                Some(line) => bail!(
                    "the kernel of guest {guest} reports: {line}\n  all of it: {}",
                    self.file(guest, "dmesg").display()
                ),
                None => Ok(()),
            },
            End::Exit(TIMED_OUT | KILLED) => bail!(
                "guest {guest}: no end after {} s{}",
                self.script.limit.as_secs(),
                self.quote(guest, "output")
            ),
            End::Exit(status) => bail!(
                "guest {guest}: exit status {status}{}{}",
                bug(&bugs).map_or_else(String::new, |line| format!(", its kernel reports: {line}")),
                self.quote(guest, "output")
            ),
            End::NoStatus => bail!(
                "guest {guest} died, or hangs{}{}",
                self.quote(guest, "output"),
                self.quote(guest, "console")
            ),
            End::NoBoot => bail!("guest {guest} did not boot"),
        }
    }

    /// The end of one of its files, to follow a message.
    fn quote(&self, guest: char, what: &str) -> String {
        let path = self.file(guest, what);
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let end = lines
            .get(lines.len().saturating_sub(TAIL)..)
            .unwrap_or_default();
        format!(
            "\n  | {}\n  all of it: {}",
            end.join("\n  | "),
            path.display()
        )
    }
}

/// A network card on the wire between two guests.
fn card(guest: char, wire: &Path) -> String {
    let server = if guest == 'a' { "on" } else { "off" };
    let wire = wire.display();
    let last = u32::from(guest) & 0xff;
    format!(
        "-netdev stream,id={NETDEV},server={server},addr.type=unix,addr.path={wire} \
         -device virtio-net-pci,netdev={NETDEV},mac=52:54:00:00:00:{last:02x}"
    )
}

/// The first line in which a kernel says that it is broken. A soft lockup only says that the host is busy.
fn bug(dmesg: &str) -> Option<&str> {
    dmesg.lines().find(|line| {
        ["BUG: ", "Oops", "general protection fault", "WARNING: CPU:"]
            .iter()
            .any(|sign| line.contains(sign))
            && !line.contains("soft lockup")
    })
}

/// Waits for a file, but not for ever: without it the boot fails, and that is noticed.
fn await_file(path: &Path) {
    let start = Instant::now();
    while !path.exists() && start.elapsed() < Duration::from_secs(30) {
        thread::sleep(Duration::from_millis(20));
    }
}

fn kill(child: &mut Child) {
    // The shell's own kill: a bare Debian has no other.
    let group = format!("kill -KILL -{}", child.id());
    let _ = Command::new("sh").args(["-c", &group]).status();
    let _ = child.wait();
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

const LIBRARY: &str = include_str!("../../guest/lib.sh");

/// Boots fail once in a while.
const ATTEMPTS: u32 = 5;

/// What a boot may take without KVM on a busy machine; it takes about 15 s on a quiet one.
const BOOT: Duration = Duration::from_secs(300);

/// From the end of the script to the end of QEMU.
const SHUTDOWN: Duration = Duration::from_secs(40);

const CPUS: &str = "2";

/// What `timeout` says of a script that it ended, or had to kill.
const TIMED_OUT: i32 = 124;
const KILLED: i32 = 137;

/// Lines that a failure shows.
const TAIL: usize = 30;

#[cfg(test)]
mod tests {
    use super::{End, Run, Script, bug};
    use core::time::Duration;
    use std::{env, fs, process};

    #[test]
    fn only_this_run_can_say_that_its_guest_ran() {
        let folder = env::temp_dir().join(format!("o2poll-guest-{}", process::id()));
        let script = Script {
            name: "test",
            text: "",
            guests: 1,
            limit: Duration::from_secs(1),
        };
        let run = Run::new(&folder, &script, &[], 1).unwrap();
        let write = |what, text: &str| fs::write(run.file('a', what), text).unwrap();
        assert_eq!(run.end('a'), End::NoBoot);
        write("status", &format!("{} 0\n", run.number));
        assert_eq!(run.end('a'), End::NoBoot, "a status alone is not a run");
        write("started", "another\n");
        assert_eq!(run.end('a'), End::NoBoot);
        write("started", &format!("{}\n", run.number));
        assert_eq!(run.end('a'), End::Exit(0));
        write(
            "console",
            "tsc: PIT calibration deviates from HPET: 914544 2596149\n",
        );
        assert_eq!(run.end('a'), End::NoBoot, "its clock is wrong");
        write("console", "tsc: Detected 2596.155 MHz processor\n");
        write("status", "another 0\n");
        assert_eq!(run.end('a'), End::NoStatus);
        write("status", &format!("{} 7\n", run.number));
        assert_eq!(run.end('a'), End::Exit(7));
        assert!(run.judge('a', &End::Exit(7)).is_err());
        assert!(run.judge('a', &End::NoStatus).is_err());
        write("dmesg", "[1.0] rxe0: set active\n");
        assert!(run.judge('a', &End::Exit(0)).is_ok());
        write(
            "dmesg",
            "[1.0] BUG: kernel NULL pointer dereference, address: 0\n",
        );
        assert!(run.judge('a', &End::Exit(0)).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_busy_host_is_no_bug_of_the_kernel() {
        assert_eq!(
            bug("watchdog: BUG: soft lockup - CPU#0 stuck for 22s!"),
            None
        );
        assert!(bug("a\n[2.1] Oops: 0000 [#1] PREEMPT SMP PTI\n").is_some());
    }
}
