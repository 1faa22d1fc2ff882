//! An engine that lies: a stand-in for CRIU on the hosts of a testbed, which is the real one unless somebody has said otherwise.

use crate::testbed::Testbed;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Arguments of what a lie becomes when it hangs; nothing else on a host has them.
const HANGING: &str = "sleep 14142";

/// Passes on what the real engine and whoever has started it say to each other. When all is written, and before that is said,
/// images of this kind lose their second half; without a kind all of them go.
const CUTTER: &str = r#"
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

/// Stops the real engine as soon as it has written so much memory. Of a megabyte a part will have left.
const STALLER: &str = r#"
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

/// Says that a task is built, and builds none; `nobody` names a process before that, of a number that there cannot be. All that is
/// not for a task to be built is left to the real engine.
const CLAIMER: &str = r#"
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

/// Has all hosts use an engine that is what [`lie`] says last for its host.
///
/// # Panics
/// The testbed has no engine of its own, or its folder cannot be written.
pub fn put(bed: &Testbed) {
    let link = bed.engine().expect("an engine of its own");
    let real = fs::read_link(link).expect("a link").display().to_string();
    let script = format!(
        "#!/bin/bash\nlie=$(cat {folder}/lie-$(hostname) 2>/dev/null)\n\
         case $1 in swrk) ;; lazy-pages) lie=$1-$lie ;; *) lie= ;; esac\n\
         case $lie in lazy-pages-lazy-*) ;; lazy-*) lie= ;; esac\n\
         [[ $lie != @(wait|stall*) ]] || compgen -G '/tmp/sempa-0/pvm/images-*' >/dev/null || lie=\n\
         [[ -z $lie ]] || echo \"$lie\" >>{folder}/lied-$(hostname)\n\
         case $lie in\n\
         hang | lazy-pages-lazy-hang) exec {HANGING} ;;\n\
         silent | lazy-pages-lazy-silent) exit 0 ;;\n\
         garbage) printf 'neither yes nor no' >&$2; exec {HANGING} ;;\n\
         lazy-pages-lazy-early) {real} \"$@\" & sleep 1; kill -9 $!; exit 0 ;;\n\
         lazy-pages-lazy-garbage)\n\
         while [[ $1 != --ps-socket ]]; do shift; done\n\
         printf 'neither yes nor no, and more than anybody asked for' >&$2; exec {HANGING} ;;\n\
         killed) kill -9 $$ ;;\n\
         wait) while grep -qsx wait {folder}/lie-$(hostname); do sleep 0.02; done ;;\n\
         stall*) rm {folder}/lie-$(hostname); exec python3 {folder}/staller.py {real} \"$2\" \"${{lie#stall }}\" ;;\n\
         cut*) exec python3 {folder}/cutter.py {real} \"$2\" \"${{lie#cut }}\" ;;\n\
         empty) exec python3 {folder}/cutter.py {real} \"$2\" '' ;;\n\
         nothing | nobody) exec python3 {folder}/claimer.py {real} \"$2\" $lie ;;\n\
         esac\nexec {real} \"$@\"\n",
        folder = bed.folder().display(),
    );
    fs::write(bed.folder().join("cutter.py"), CUTTER).expect("written");
    fs::write(bed.folder().join("staller.py"), STALLER).expect("written");
    fs::write(bed.folder().join("claimer.py"), CLAIMER).expect("written");
    let fresh = link.with_extension("fresh");
    fs::write(&fresh, script).expect("written");
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).expect("executable");
    fs::rename(&fresh, link).expect("in place");
}

/// What the engine of a host does from now on: `silent` ends at once as if all were well, `garbage` answers what cannot be read,
/// `killed`, `hang`, `cut KIND` writes all and then cuts images of this kind in half, `empty` removes all of them, `stall BYTES` goes
/// no further once it has written so much memory, and tells the truth the next time; one that builds a task does not even begin. `wait`
/// does nothing until there is another word, and tells the truth then. Both are for a task, as opposed to a trial. `nothing` says that a task is built that is not, `nobody` names a
/// process that is not there as well. Where it is to fetch the memory of a task: `lazy-silent`, `lazy-garbage`, `lazy-hang`, and
/// `lazy-early` does so for a second and says then that it has all. An empty word: the truth.
///
/// # Panics
/// The testbed's folder cannot be written.
pub fn lie(bed: &Testbed, host: &str, word: &str) {
    fs::write(bed.folder().join(format!("lie-{host}")), word).expect("written");
}

/// What it has lied about on a host since [`has_lied`] was asked last, oldest first.
pub fn lies(bed: &Testbed, host: &str) -> Vec<String> {
    let lies = fs::read_to_string(bed.folder().join(format!("lied-{host}"))).unwrap_or_default();
    lies.lines().map(str::to_string).collect()
}

/// The same since this was asked last. What is added while this is asked may be lost: who waits for a lie asks [`lies`].
pub fn has_lied(bed: &Testbed, host: &str) -> Vec<String> {
    let lies = lies(bed, host);
    // There may be none.
    let _ = fs::remove_file(bed.folder().join(format!("lied-{host}")));
    lies
}

/// True for a command line of an engine, or of what lies in its place.
pub fn is_engine(line: &str) -> bool {
    [" swrk ", " lazy-pages ", HANGING]
        .iter()
        .any(|words| line.contains(words))
}
