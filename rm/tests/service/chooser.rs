//! Placement by an external chooser that the policy names.

use crate::common::{TestBed, fake_vm, request, rm_tid};
use bytes::Bytes;
use pvm_rm::decide::{Chooser, ChooserName, Choosers, HostOffer, PlacementPolicy};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::{Options, Service, ServiceError, TAG_POLICY};
use sempa_proto::PvmError;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use std::sync::Arc;

/// A chooser that selects the offered host with the highest id, for at most two tasks. It refuses
/// the program `unwanted`.
struct HighestHostChooser;

impl Chooser for HighestHostChooser {
    fn name(&self) -> &str {
        "last"
    }

    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[HostOffer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String> {
        if request.program == "unwanted" {
            return Err("it has no reservation".into());
        }
        let highest_host = (0..offers.len())
            .max_by_key(|i| offers[*i].host.id)
            .ok_or("nothing is offered")?;
        Ok(vec![highest_host; count.min(2)])
    }
}

fn policy_with_chooser(name: &str) -> EffectivePolicy {
    EffectivePolicy {
        placement: PlacementPolicy::Chooser(ChooserName::new(name).expect("a name")),
        ..EffectivePolicy::default()
    }
}

fn options_with_chooser(name: &str) -> Options {
    let (policy, choosers) = (
        policy_with_chooser(name),
        Choosers::new([Arc::new(HighestHostChooser) as Arc<dyn Chooser>]),
    );
    Options {
        policy,
        command_line_policy: policy,
        choosers,
        starts_watchers: true,
        policy_file: "rm.toml".into(),
        ..Options::default()
    }
}

/// An external chooser selects among the hosts that accept guests. The explanation names the
/// chooser, or states why the chooser selected no host.
#[test]
fn external_choice_is_checked_and_reported() {
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_options(&vm, options_with_chooser("last"));
    bed.report_owner_present(3);
    bed.state().request_spawn(1, &request(3));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    let placements: Vec<(u16, u32)> = orders
        .iter()
        .map(|order| (order.host.index(), order.request.task_count))
        .collect();
    assert_eq!(placements, [(2, 2)], "h3 was not offered");
    orders
        .iter()
        .for_each(|order| drop(bed.state().acknowledge(order)));
    bed.process_inbox();
    let results = bed.state().spawn_reply(1).expect("answered").expect("good");
    assert_eq!(results[2], Err(PvmError::OutOfRes), "he has places for two");
    let record_texts: Vec<String> = bed
        .state()
        .recorded_events
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(
        record_texts
            .iter()
            .any(|text| text.contains("chosen by last; room for 2 of 3")),
        "{record_texts:?}"
    );
    bed.state().request_spawn(
        2,
        &SpawnRequest {
            program: "unwanted".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert_eq!(
        bed.state()
            .spawn_reply(2)
            .expect("answered")
            .expect("tried"),
        [Err(PvmError::OutOfRes)]
    );
    let notes = bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("last chose no host: it has no reservation")),
        "{notes:?}"
    );
    // A request that names a host does not reach the chooser.
    bed.state().request_spawn(
        3,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h1".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert_eq!(bed.state().take_start_orders()[0].host.index(), 1);
}

/// A policy that names an unknown chooser is refused. The error lists the available choosers.
#[test]
fn unknown_chooser_is_refused() {
    let error = Service::start(fake_vm(1), options_with_chooser("slurm"))
        .map(|_| ())
        .expect_err("nobody is called so");
    assert!(
        matches!(&error, ServiceError::UnknownChooser(unknown_chooser) if unknown_chooser.name == "slurm" && unknown_chooser.available_choosers == "there are last"),
        "{error}"
    );
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_options(
        &vm,
        Options {
            choosers: Choosers::default(),
            ..options_with_chooser("last").with_placing(PlacementPolicy::Load)
        },
    );
    let change_policy = |bed: &mut TestBed, text: &'static str| {
        bed.state().post_message(
            rm_tid(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.process_inbox();
        bed.state().recorded_notes().pop().unwrap_or_default()
    };
    let note = change_policy(&mut bed, "placing = \"choice:last\"\n");
    assert!(
        note.contains("rm.toml: the policy names the chooser \"last\", but this resource manager has no chooser"),
        "{note}"
    );
    assert!(note.ends_with("and the policy is unchanged"), "{note}");
    bed.state().request_spawn(1, &request(3));
    bed.process_inbox();
    assert_eq!(
        bed.state().take_start_orders().len(),
        3,
        "by load as before"
    );
}

/// Replacement of the placement policy in options.
trait WithPlacing {
    fn with_placing(self, placing: PlacementPolicy) -> Self;
}

impl WithPlacing for Options {
    fn with_placing(self, placing: PlacementPolicy) -> Self {
        let policy = EffectivePolicy {
            placement: placing,
            ..self.policy
        };
        Self {
            policy,
            command_line_policy: policy,
            ..self
        }
    }
}
