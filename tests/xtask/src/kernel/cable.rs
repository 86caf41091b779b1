//! The cable of a guest, which QEMU pulls and plugs in again when the guest asks for it.
//!
//! A guest that sets its card down itself would stop the whole wire: QEMU holds what comes for such a card, and then takes
//! nothing more from the other guest. With `set_link` the card has no carrier, and frames are gone either way.

use core::time::Duration;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// One guest's.
#[derive(Debug)]
pub(super) struct Cable {
    /// What the guest asks for: `off` or `on`.
    asked: PathBuf,
    /// What it is told.
    done: PathBuf,
    /// The socket of QEMU's monitor.
    monitor: PathBuf,
    now: String,
}

impl Cable {
    /// Of a guest that shares this folder.
    pub(super) fn new(folder: &Path, guest: char, monitor: PathBuf) -> Self {
        Self {
            asked: folder.join(format!("{guest}.cable")),
            done: folder.join(format!("{guest}.cable.is")),
            monitor,
            now: String::from("on"),
        }
    }

    /// QEMU's options for its monitor.
    pub(super) fn options(monitor: &Path) -> String {
        format!("-qmp unix:{},server=on,wait=off", monitor.display())
    }

    /// Does what the guest has asked for since.
    pub(super) fn look(&mut self) -> Result<()> {
        let Ok(asked) = fs::read_to_string(&self.asked) else {
            return Ok(());
        };
        let up = match asked.trim() {
            asked if asked == self.now => return Ok(()),
            "on" => true,
            "off" => false,
            // It is being written.
            _ => return Ok(()),
        };
        let stream =
            UnixStream::connect(&self.monitor).context("QEMU's monitor does not answer")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        set_link(&stream, up)?;
        asked.trim().clone_into(&mut self.now);
        fs::write(&self.done, &self.now)?;
        Ok(())
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.monitor);
    }
}

fn set_link(stream: &UnixStream, up: bool) -> Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let mut answer = || -> Result<Value> {
        loop {
            let line = lines.next().context("QEMU's monitor has hung up")??;
            let told: Value = serde_json::from_str(&line)?;
            // Events come at any time.
            if told.get("event").is_none() {
                return Ok(told);
            }
        }
    };
    let greeting = answer()?;
    if greeting.get("QMP").is_none() {
        bail!("QEMU's monitor begins with {greeting}");
    }
    for command in [
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "set_link", "arguments": { "name": NETDEV, "up": up } }),
    ] {
        let mut stream = stream;
        writeln!(stream, "{command}")?;
        let told = answer()?;
        if told.get("return").is_none() {
            bail!("QEMU answers {told} to {command}");
        }
    }
    Ok(())
}

/// The name of a guest's end of the wire.
pub(super) const NETDEV: &str = "n0";

/// For an answer of QEMU on a busy host.
const PATIENCE: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::Cable;
    use serde_json::{Value, json};
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::{env, fs, process, thread};

    /// A monitor that answers as QEMU does, `most` times; what it was asked to do.
    fn monitor(listener: UnixListener, last: Value) -> thread::JoinHandle<Vec<Value>> {
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut asked = Vec::new();
            writeln!(stream, "{}", json!({ "QMP": {} })).unwrap();
            for answer in [json!({ "return": {} }), last] {
                let line = lines.next().unwrap().unwrap();
                asked.push(serde_json::from_str(&line).unwrap());
                writeln!(stream, "{}", json!({ "event": "SOMETHING" })).unwrap();
                writeln!(stream, "{answer}").unwrap();
            }
            asked
        })
    }

    #[test]
    fn a_cable_is_pulled_once_when_its_guest_asks_for_it() {
        let folder = env::temp_dir().join(format!("o2poll-cable-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("monitor");
        let mut cable = Cable::new(&folder, 'b', socket.clone());
        // Nobody has asked, hence nobody listens.
        cable.look().unwrap();
        let told = || fs::read_to_string(folder.join("b.cable.is"));
        let listener = UnixListener::bind(&socket).unwrap();
        let qemu = monitor(listener, json!({ "return": {} }));
        fs::write(folder.join("b.cable"), "").unwrap();
        cable.look().unwrap();
        assert!(told().is_err());
        fs::write(folder.join("b.cable"), "off\n").unwrap();
        cable.look().unwrap();
        let asked = qemu.join().unwrap();
        assert_eq!(asked[1]["arguments"], json!({ "name": "n0", "up": false }));
        assert_eq!(told().unwrap(), "off");
        cable.look().unwrap();
        fs::remove_file(&socket).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let qemu = monitor(listener, json!({ "error": {} }));
        fs::write(folder.join("b.cable"), "on\n").unwrap();
        assert!(cable.look().is_err(), "QEMU could not do it");
        qemu.join().unwrap();
        assert_eq!(told().unwrap(), "off");
        drop(cable);
        fs::remove_dir_all(&folder).unwrap();
    }
}
