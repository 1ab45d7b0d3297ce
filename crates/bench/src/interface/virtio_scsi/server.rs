//! The arguments of a server for a controller.

use std::path::Path;

use mqblk_daemon::interfaces::INTERFACES;
use mqblk_daemon::keys::TableKey;

use crate::interface::vhost_user;
use crate::plan::{Case, Combination, split_pairs};

/// The id of the controller.
const CONTROLLER: &str = "bench";

/// Returns true for settings of a controller. All others are settings of each logical unit, also the id.
fn is_of_controller(pair: &str) -> bool {
    let name = pair.split('=').next().unwrap_or_default();
    let tables = mqblk_daemon::keys::tables(INTERFACES).into_iter().filter(|table| table.name == "controller");
    let is_named = |own: TableKey| own.key.name == name || own.key.alias == Some(name);
    name != "id" && tables.flat_map(|table| table.keys).any(is_named)
}

/// Returns target and number of each logical unit.
pub(super) fn units(of: &Combination) -> impl Iterator<Item = (u16, u16)> + use<> {
    let Combination { targets, luns, .. } = *of;
    (0..targets).flat_map(move |target| (0..luns).map(move |lun| (target, lun)))
}

/// Returns settings of one logical unit.
pub(super) fn of_unit(settings: &str, target: u16, lun: u16) -> String {
    settings.replace("{t}", &target.to_string()).replace("{l}", &lun.to_string())
}

/// Returns `--controller`, and a `--lun` for each logical unit.
pub(super) fn arguments(case: &Case<'_>, socket: &Path) -> Vec<String> {
    let queues = case.combination.queues;
    let path = vhost_user::socket_value(socket);
    let pairs = split_pairs(case.target.spec().unwrap_or_default());
    let (own, units): (Vec<&str>, Vec<&str>) = pairs.into_iter().partition(|pair| is_of_controller(pair));
    let mut controller = format!("id={CONTROLLER},socket={path},queues={queues}");
    let queue_size = case.queue_size_pair();
    own.into_iter().chain(queue_size.as_deref()).for_each(|pair| controller.push_str(&format!(",{pair}")));
    let mut arguments = vec!["--controller".to_owned(), controller];
    for (target, lun) in self::units(&case.combination) {
        let mut unit = format!("controller={CONTROLLER},target={target},lun={lun}");
        if !units.iter().any(|pair| pair.starts_with("id=")) {
            unit.push_str(&format!(",id=t{target}l{lun}"));
        }
        for pair in &units {
            unit.push_str(&format!(",{}", of_unit(pair, target, lun)));
        }
        arguments.extend(["--lun".to_owned(), unit]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plan;

    #[test]
    fn a_disks_settings_are_dealt_to_controller_and_units() {
        let line = "--interface virtio-scsi --disk path=/d,,{t}/{l}.img,poll=off,direct=off --targets 2 --luns 2 --queues 3 --queue-size 2048";
        let plan = plan(line).unwrap();
        let case = plan.case(&plan.targets[0], &plan.combinations[0]);
        let unit =
            |t: u16, l: u16| format!("controller=bench,target={t},lun={l},id=t{t}l{l},path=/d,,{t}/{l}.img,direct=off");
        let expected = [
            "--controller".to_owned(),
            "id=bench,socket=/s,,1,queues=3,poll=off,queue-size=2048".into(),
            "--lun".into(),
            unit(0, 0),
            "--lun".into(),
            unit(0, 1),
            "--lun".into(),
            unit(1, 0),
            "--lun".into(),
            unit(1, 1),
        ];
        assert_eq!(arguments(&case, Path::new("/s,1")), expected);
    }
}
