"""Slow, literal readings of the label-free criteria and of the accuracy estimate: loops and textbook formulas."""

import math


def softmax(row, temperature=1.0):
    top = max(row)
    powers = [math.exp((value - top) / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p > 0)


def smoothed_cross_entropy(scores, labels, temperature):
    smoothing = 1 / (len(scores) + 1)
    total = 0.0
    for row, label in zip(scores, labels, strict=True):
        top = max(row)
        log_sum = math.log(sum(math.exp((value - top) / temperature) for value in row))
        for k, value in enumerate(row):
            wanted = (1 - smoothing) * (k == label) + smoothing / len(row)
            total -= wanted * ((value - top) / temperature - log_sum)
    return total / len(scores)


def calibrate(scores, labels, steps=1500):
    """The best of a fine grid of temperatures."""
    low, high = math.log(0.05), math.log(20)
    grid = [math.exp(low + (high - low) * step / steps) for step in range(steps + 1)]
    return min(grid, key=lambda temperature: smoothed_cross_entropy(scores, labels, temperature))


def infomax(scores, temperature=1.0):
    probs = [softmax(row, temperature) for row in scores]
    mean = [sum(row[k] for row in probs) / len(probs) for k in range(len(probs[0]))]
    return entropy(mean) - sum(entropy(row) for row in probs) / len(probs)


def density(scores):
    unit = []
    for row in scores:
        probs = softmax(row)
        length = math.sqrt(sum(p * p for p in probs))
        unit.append([p / length for p in probs])
    total = 0.0
    for i, one in enumerate(unit):
        similar = [sum(a * b for a, b in zip(one, other, strict=True)) for j, other in enumerate(unit) if j != i]
        total += entropy(softmax(similar, 0.05))
    return total / len(unit)


def controlled_risk(losses, weights):
    """Deep embedded validation's risk from weighted losses and their weights, as in its paper."""
    count = len(weights)
    mean_loss, mean_weight = sum(losses) / count, sum(weights) / count
    pairs = zip(losses, weights, strict=True)
    covariance = sum((loss - mean_loss) * (weight - mean_weight) for loss, weight in pairs) / count
    variance = sum((weight - mean_weight) ** 2 for weight in weights) / count
    eta = -covariance / variance
    return mean_loss + eta * mean_weight - eta


def thresholded_confidence(source, right, target):
    """Average thresholded confidence when no two source texts are equally sure."""
    wrong = sum(not each for each in right)
    if wrong == len(source):
        return 0.0
    threshold = sorted(source)[wrong]
    return sum(confidence >= threshold for confidence in target) / len(target)
