//! A worker as a task of the virtual machine.

use crate::host_store::HostStore;
use crate::protocol::{CLASS_VARIABLE, RUN_VARIABLE, TO_MASTER_TAG, TO_WORKER_TAG, ToMaster};
use crate::raw::{Failure, RawWorker};
use crate::worker_loop::{WorkerEnd, WorkerIdentity, WorkerInput, WorkerPort, run_worker};
use libpvm::proto::task::{NotifyRequest, NotifySubjects};
use libpvm::proto::{Message, Tid};
use libpvm::{Body, Content, Inbox, Vm};
use sempa_work_dispatch::{ClassId, Groups, MAILBOX_PREFIX};
use std::path::Path;
use std::time::{Duration, Instant};

/// Tag of the notice that the master has ended.
const MASTER_NOTICE_TAG: i32 = 0x5357_4d06;
const CONTEXT: i32 = 0;
/// Interval at which a worker looks for the next master.
const MASTER_SEARCH_INTERVAL: Duration = Duration::from_millis(200);
/// Time for which a worker that nobody spawned looks for its run.
const FIRST_MASTER_PATIENCE: Duration = Duration::from_secs(60);

/// Executes tasks of the run that has spawned this process, or of the run that the environment
/// variable `SEMPA_WORK_RUN` names. The worker belongs to `groups`. Returns when the run releases
/// the worker.
///
/// # Errors
/// No run was found, the connection to the virtual machine is lost, or the program refused the init
/// data.
pub fn work<W: RawWorker>(vm: &Vm, worker: &mut W, groups: Groups) -> Result<WorkerEnd, Failure> {
    let class = std::env::var(CLASS_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let identity = WorkerIdentity {
        class: ClassId(class.unwrap_or(0)),
        groups,
    };
    let mut port = VmPort {
        vm: vm.clone(),
        master: None,
    };
    match vm.parent() {
        Some(parent) => port.follow(parent)?,
        None => {
            let Ok(run_name) = std::env::var(RUN_VARIABLE) else {
                return Err(format!(
                    "the worker does not know its run: start workers through a master, or set \
                     {RUN_VARIABLE} to the name of the run"
                )
                .into());
            };
            if !port.find_master(&run_name, FIRST_MASTER_PATIENCE)? {
                return Err(format!(
                    "no master of the run {run_name} was found within {} s; `pvm work list` shows \
                     the runs",
                    FIRST_MASTER_PATIENCE.as_secs()
                )
                .into());
            }
        }
    }
    run_worker(port, worker, identity)
}

struct VmPort {
    vm: Vm,
    /// The present master; `None` if it is lost.
    master: Option<Tid>,
}

impl VmPort {
    /// Sends to this master from now on, and requests a notice of its end.
    fn follow(&mut self, master: Tid) -> Result<(), Failure> {
        self.master = Some(master);
        let request = NotifyRequest {
            subjects: NotifySubjects::TaskExit(vec![master]),
            ctx: CONTEXT,
            tag: MASTER_NOTICE_TAG,
            is_cancellation: false,
        };
        Ok(self.vm.notify(request)?)
    }

    /// Returns the master that is registered under the name of the run.
    fn registered_master(&self, run_name: &str) -> Option<Tid> {
        let name = format!("{MAILBOX_PREFIX}{run_name}");
        let message = self.vm.mailbox_take(&name, 0, 0).ok()?;
        let tid = message.items().ok()?.read_int().ok()?;
        Some(Tid::from_raw(tid))
    }

    /// Returns the input in a message; `None` for a message of an earlier master.
    fn decode(&mut self, message: &Message) -> Option<WorkerInput> {
        if message.tag == MASTER_NOTICE_TAG {
            let ended = message.items().ok()?.read_int().ok()?;
            let is_present = self.master == Some(Tid::from_raw(ended));
            return is_present.then(|| {
                self.master = None;
                WorkerInput::MasterLost
            });
        }
        if self.master != Some(message.src) {
            return None;
        }
        postcard::from_bytes(&message.body)
            .ok()
            .map(WorkerInput::Message)
    }
}

fn is_for_worker(message: &Message) -> bool {
    message.ctx == CONTEXT && [TO_WORKER_TAG, MASTER_NOTICE_TAG].contains(&message.tag)
}

impl WorkerPort for VmPort {
    fn next_input(&mut self, waits: bool) -> Result<Option<WorkerInput>, Failure> {
        loop {
            let mut take = |inbox: &mut Inbox| inbox.take_first(is_for_worker);
            let message = if waits {
                let waited = self.vm.runtime().wait_for_inbox(None, &mut take);
                waited.map_err(|_| self.vm.runtime().lost_reason())?
            } else {
                self.vm.runtime().check_inbox(&mut take)
            };
            let Some(message) = message else {
                return Ok(None);
            };
            if let Some(input) = self.decode(&message) {
                return Ok(Some(input));
            }
        }
    }

    fn send(&mut self, message: &ToMaster) -> Result<(), Failure> {
        let Some(master) = self.master else {
            return Ok(());
        };
        let body = Body {
            bytes: postcard::to_allocvec(message)?.into(),
            ..Body::empty()
        };
        Ok(self.vm.send(master, TO_MASTER_TAG, body)?)
    }

    fn find_master(&mut self, run_name: &str, patience: Duration) -> Result<bool, Failure> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(master) = self.registered_master(run_name) {
                self.follow(master)?;
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            // No message can arrive that must be handled before the next master is found.
            std::thread::sleep(MASTER_SEARCH_INTERVAL.min(patience));
            if !self.vm.runtime().is_connected() {
                return Err(self.vm.runtime().lost_reason().into());
            }
        }
    }

    fn host_name(&self) -> String {
        let host = self.vm.host();
        let table = self.vm.config().ok();
        let entry = table.as_ref().and_then(|table| table.get(host));
        entry.map_or_else(|| host.tid().to_string(), |entry| entry.name.clone())
    }

    fn host_store(&self) -> Option<HostStore> {
        let socket = std::env::var_os("PVMSOCK")?;
        HostStore::open(Path::new(&socket).parent()?)
    }
}
