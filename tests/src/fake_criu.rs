//! A fake CRIU on the hosts of a testbed. It runs the real CRIU unless a test has selected another
//! behaviour by a command word.

use crate::testbed::Testbed;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The command that the fake CRIU executes when it must hang. No other process of a host has these
/// arguments.
const HANG_COMMAND: &str = "sleep 14142";

/// Python program: forwards messages between the real CRIU and the tasker. When all images are
/// written, and before the program forwards CRIU's report, it truncates the images of one kind to
/// half their size. Without a kind, it removes all images.
const TRUNCATE_IMAGES_PY: &str = r#"
import glob, os, select, socket, subprocess, sys
real, number, kind = sys.argv[1:]
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.set_inheritable(theirs.fileno(), True)
engine = subprocess.Popen([real, "swrk", str(theirs.fileno())], close_fds=False)
theirs.close()
starter = socket.socket(fileno=int(number))
while True:
    for ready in select.select([starter, ours], [], [])[0]:
        words = ready.recv(1 << 20)
        if not words:
            if ready is starter:
                engine.kill()
            sys.exit(engine.wait())
        if ready is ours and b"post-dump" in words:
            for path in glob.glob("/tmp/sempa-0/pvm/images-*/" + (kind or "*.img")):
                os.truncate(path, os.path.getsize(path) // 2) if kind else os.remove(path)
        (ours if ready is starter else starter).send(words)
"#;

/// Python program: runs the real CRIU, and stops it as soon as one of its files with memory has at
/// least a given size. The last argument is this size in bytes. If it is a megabyte, a part of the
/// memory has been sent to the target before the stop.
const STALL_DUMP_PY: &str = r#"
import glob, os, signal, subprocess, sys
real, number, least = sys.argv[1:]
engine = subprocess.Popen([real, "swrk", number], close_fds=False)
os.nice(-20)
while engine.poll() is None:
    if any(os.path.getsize(path) >= int(least) for path in glob.glob("/tmp/sempa-0/pvm/images-*/pages-*.img")):
        engine.send_signal(signal.SIGSTOP)
        break
status = engine.wait()
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"#;

/// Python program: reports a restored task without restoring one. With the argument `nobody`, first
/// reports a process number that cannot exist. Forwards all requests except restores to the real
/// CRIU.
const FALSE_RESTORE_PY: &str = r#"
import os, socket, sys
real, number, how = sys.argv[1:]
starter = socket.socket(fileno=int(number))
if not starter.recv(1 << 20, socket.MSG_PEEK).startswith(b"\x08\x02"):
    os.execv(real, [real, "swrk", number])
starter.recv(1 << 20)
if how == "nobody":
    starter.send(b"\x08\x06\x10\x01\x2a\x13\x0a\x0cpost-restore\x10\x80\x80\x80\x02")
    starter.recv(1 << 20)
starter.send(b"\x08\x02\x10\x01\x22\x02\x08\x01")
"#;

/// Installs the fake CRIU on all hosts. [`set_behaviour`] selects its behaviour.
pub fn install(testbed: &Testbed) {
    let (engine_link, real_criu) = engine_of(testbed);
    let script = format!(
        "#!/bin/bash\n[[ $1 != swrk ]] || until read -t 0 -u $2; do sleep 0.01; done\nlie=$(cat {folder}/lie-$(hostname) 2>/dev/null)\n\
         case $1 in swrk) ;; lazy-pages) lie=$1-$lie ;; *) lie= ;; esac\n\
         case $lie in lazy-pages-lazy-*) ;; lazy-*) lie= ;; esac\n\
         [[ $lie != @(wait|stall*) ]] || compgen -G '/tmp/sempa-0/pvm/images-*' >/dev/null || lie=\n\
         [[ -z $lie ]] || echo \"$lie\" >>{folder}/lied-$(hostname)\n\
         case $lie in\n\
         hang | lazy-pages-lazy-hang) exec {HANG_COMMAND} ;;\n\
         silent | lazy-pages-lazy-silent) exit 0 ;;\n\
         garbage) printf 'neither yes nor no' >&$2; exec {HANG_COMMAND} ;;\n\
         lazy-pages-lazy-early) {real_criu} \"$@\" & sleep 1; kill -9 $!; exit 0 ;;\n\
         lazy-pages-lazy-garbage)\n\
         while [[ $1 != --ps-socket ]]; do shift; done\n\
         printf 'neither yes nor no, and more than anybody asked for' >&$2; exec {HANG_COMMAND} ;;\n\
         killed) kill -9 $$ ;;\n\
         wait) while grep -qsx wait {folder}/lie-$(hostname); do sleep 0.02; done ;;\n\
         stall*) rm {folder}/lie-$(hostname); exec python3 {folder}/staller.py {real_criu} \"$2\" \"${{lie#stall }}\" ;;\n\
         cut*) exec python3 {folder}/cutter.py {real_criu} \"$2\" \"${{lie#cut }}\" ;;\n\
         empty) exec python3 {folder}/cutter.py {real_criu} \"$2\" '' ;;\n\
         nothing | nobody) exec python3 {folder}/claimer.py {real_criu} \"$2\" $lie ;;\n\
         esac\nexec {real_criu} \"$@\"\n",
        folder = testbed.folder().display(),
    );
    fs::write(testbed.folder().join("cutter.py"), TRUNCATE_IMAGES_PY).expect("written");
    fs::write(testbed.folder().join("staller.py"), STALL_DUMP_PY).expect("written");
    fs::write(testbed.folder().join("claimer.py"), FALSE_RESTORE_PY).expect("written");
    replace_engine(engine_link, &script);
}

/// Replaces CRIU on all hosts by a program that runs the real CRIU and writes its log to files in
/// the testbed's folder, for [`engine_logs`].
///
/// # Panics
/// The testbed has no engine of its own, or its folder cannot be written.
pub fn install_logger(testbed: &Testbed) {
    let (engine_link, real_criu) = engine_of(testbed);
    let script = format!(
        "#!/bin/bash\n[[ $1 != swrk ]] || exec >>{}/engine-log-$(hostname)-$$\nexec {real_criu} \"$@\"\n",
        testbed.folder().display()
    );
    replace_engine(engine_link, &script);
}

/// Returns the logs of all dumps and restores since [`install_logger`].
///
/// # Panics
/// The testbed's folder cannot be read.
pub fn engine_logs(testbed: &Testbed) -> Vec<String> {
    let is_log = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("engine-log-")
    };
    fs::read_dir(testbed.folder())
        .expect("readable")
        .flatten()
        .filter(is_log)
        .map(|entry| fs::read_to_string(entry.path()).expect("readable"))
        // An engine that got no request writes nothing.
        .filter(|log| !log.is_empty())
        .collect()
}

/// Returns the path of the testbed's own engine, and the path of the real CRIU.
fn engine_of(testbed: &Testbed) -> (&Path, String) {
    let engine_link = testbed.engine().expect("an engine of its own");
    let real_criu = fs::read_link(engine_link).expect("a link");
    (engine_link, real_criu.display().to_string())
}

fn replace_engine(engine_link: &Path, script: &str) {
    let new_link = engine_link.with_extension("fresh");
    fs::write(&new_link, script).expect("written");
    fs::set_permissions(&new_link, fs::Permissions::from_mode(0o755)).expect("executable");
    fs::rename(&new_link, engine_link).expect("in place");
}

/// Sets the behaviour of the fake CRIU on a host by a command word:
/// - empty word: run the real CRIU.
/// - `silent`: exit at once with success.
/// - `garbage`: answer with bytes that are no message.
/// - `killed`: die of SIGKILL.
/// - `hang`: neither answer nor exit.
/// - `cut KIND`: write all images, then truncate the images of this kind to half their size.
/// - `empty`: write all images, then remove them.
/// - `stall BYTES`: stop once this number of bytes of memory is written, and run the real CRIU the
///   next time; a restore is stopped before it begins.
/// - `wait`: wait until a test sets another command word, then run the real CRIU.
/// - `nothing`: report a restored task without restoring one.
/// - `nobody`: as `nothing`, and report a process that does not exist.
/// - `lazy-silent`, `lazy-garbage`, `lazy-hang`: as the command words without `lazy-`, in the
///   process that fetches the memory of a task in post-copy.
/// - `lazy-early`: fetch memory for a second, then exit with success.
///
/// An engine obeys the command word that is set when it gets its request. `stall` and `wait` do not
/// affect the tasker's engine probe.
///
/// # Panics
/// The testbed's folder cannot be written.
pub fn set_behaviour(testbed: &Testbed, host: &str, command_word: &str) {
    fs::write(testbed.folder().join(format!("lie-{host}")), command_word).expect("written");
}

/// Returns the command words that the fake CRIU of a host has obeyed since the last call of
/// [`take_misbehaviours`], oldest first.
pub fn misbehaviours(testbed: &Testbed, host: &str) -> Vec<String> {
    let lines =
        fs::read_to_string(testbed.folder().join(format!("lied-{host}"))).unwrap_or_default();
    lines.lines().map(str::to_string).collect()
}

/// As [`misbehaviours`], and clears the record. A line that is added between the read and the
/// removal is lost, so a test that waits for a line must call [`misbehaviours`].
pub fn take_misbehaviours(testbed: &Testbed, host: &str) -> Vec<String> {
    let lines = misbehaviours(testbed, host);
    // An error is ignored, because the file may not exist.
    let _ = fs::remove_file(testbed.folder().join(format!("lied-{host}")));
    lines
}

/// True if `command_line` is the command line of CRIU or of the fake CRIU.
pub fn is_engine_command_line(command_line: &str) -> bool {
    [" swrk ", " lazy-pages ", HANG_COMMAND]
        .iter()
        .any(|part| command_line.contains(part))
}
